// Panels for AVX2, with VNNI if the compiler targets it: a vector holds four columns of 8 rows. Part of panels.h.
//
// Without VNNI, neighbouring products are summed in 16 bits as long as they fit: DEPTH times two products.
#pragma once

namespace chatterm {
namespace {

constexpr int AT_ONCE = 4;          // rows of inputs that are multiplied with all rows of a panel
constexpr int HALVES = PANEL / 8;  // vectors for the rows of a panel

// dots[r][h] += the digits from `digits` on times those of the inputs from `q` on, over DEPTH * 4 columns.
template <int DEPTH, bool SIGNED>
inline void add_products(const uint32_t* digits, const uint32_t* q, __m256i (*dots)[HALVES]) {
#if defined(__AVXVNNI__)
  CT_UNROLL
  for (int i = 0; i < DEPTH; ++i) {
    __m256i w[HALVES];
    CT_UNROLL
    for (int h = 0; h < HALVES; ++h) w[h] = load_bytes(digits + i * PANEL + 8 * h);
    CT_UNROLL
    for (int r = 0; r < AT_ONCE; ++r) {
      const __m256i x = _mm256_set1_epi32(int32_t(q[i * TILE + r]));
      CT_UNROLL
      for (int h = 0; h < HALVES; ++h) dots[r][h] = add_dot(dots[r][h], w[h], x);
    }
  }
#else
  __m256i pairs[AT_ONCE][HALVES];
  CT_UNROLL
  for (int i = 0; i < DEPTH; ++i) {
    __m256i w[HALVES];
    CT_UNROLL
    for (int h = 0; h < HALVES; ++h) w[h] = load_bytes(digits + i * PANEL + 8 * h);
    CT_UNROLL
    for (int r = 0; r < AT_ONCE; ++r) {
      const __m256i x = _mm256_set1_epi32(int32_t(q[i * TILE + r]));
      CT_UNROLL
      for (int h = 0; h < HALVES; ++h) {
        const __m256i products = SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(x, w[h]))
                                        : _mm256_maddubs_epi16(w[h], x);
        pairs[r][h] = i ? _mm256_add_epi16(pairs[r][h], products) : products;
      }
    }
  }
  CT_UNROLL
  for (int r = 0; r < AT_ONCE; ++r) {
    CT_UNROLL
    for (int h = 0; h < HALVES; ++h) {
      dots[r][h] = _mm256_add_epi32(dots[r][h], _mm256_madd_epi16(pairs[r][h], _mm256_set1_epi16(1)));
    }
  }
#endif
}

template <int GROUP, int DEPTH, bool SIGNED>
void multiply_groups(const Panel& panel, const InputTile& x, float* out, int32_t stride) {
  constexpr int FOURS = GROUP / 4;
  __m256 sums[AT_ONCE][HALVES];
  CT_UNROLL
  for (int r = 0; r < AT_ONCE; ++r) {
    CT_UNROLL
    for (int h = 0; h < HALVES; ++h) sums[r][h] = _mm256_setzero_ps();
  }
  for (int32_t g = 0; g < panel.columns / GROUP; ++g) {
    __m256i dots[AT_ONCE][HALVES];
    CT_UNROLL
    for (int r = 0; r < AT_ONCE; ++r) {
      CT_UNROLL
      for (int h = 0; h < HALVES; ++h) dots[r][h] = _mm256_setzero_si256();
    }
    CT_UNROLL
    for (int i = 0; i < FOURS; i += DEPTH) {
      add_products<DEPTH, SIGNED>(panel.digits + (g * FOURS + i) * PANEL, x.q + (g * FOURS + i) * TILE, dots);
    }
    const float* steps = x.scale + g * GROUP / 32 * TILE;
    const float* lows = x.low + g * TILE;
    CT_UNROLL
    for (int h = 0; h < HALVES; ++h) {
      const __m256 scale = _mm256_loadu_ps(panel.scale + g * PANEL + 8 * h);
      const __m256 low = _mm256_loadu_ps(panel.low + g * PANEL + 8 * h);
      CT_UNROLL
      for (int r = 0; r < AT_ONCE; ++r) {
        const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(steps[r]));
        sums[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][h]), factor, sums[r][h]);
        if (!SIGNED) sums[r][h] = _mm256_fmadd_ps(low, _mm256_set1_ps(lows[r]), sums[r][h]);
      }
    }
  }
  CT_UNROLL
  for (int r = 0; r < AT_ONCE; ++r) {
    CT_UNROLL
    for (int h = 0; h < HALVES; ++h) _mm256_storeu_ps(out + r * stride + 8 * h, sums[r][h]);
  }
}

using Groups = void (*)(const Panel& panel, const InputTile& x, float* out, int32_t stride);

inline Groups groups_of(int32_t type) {
  switch (type) {
    case CT_Q8_0:
      return multiply_groups<32, 1, SIGNED_BYTES>;
    case CT_Q5_K:
    case CT_MXFP4:
      return multiply_groups<32, 4, false>;  // 4 * 2 * 31 * 127 < 2^15
    case CT_Q6_K:
      return multiply_groups<16, 2, false>;  // 2 * 2 * 63 * 127
    default:
      return multiply_groups<32, 8, false>;  // 8 * 2 * 15 * 127
  }
}

template <int ROWS>
void multiply_tile(const Panel& panel, const InputTile& x, float* out, int32_t stride) {
  const Groups groups = groups_of(panel.type);
  for (int r = 0; r < ROWS; r += AT_ONCE) groups(panel, {x.q + r, x.scale + r, x.low + r}, out + r * stride, stride);
}

}  // namespace
}  // namespace chatterm
