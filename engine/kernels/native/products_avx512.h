// Products of several rows of inputs with small blocks, for AVX-512 with VNNI: a vector has PANEL rows of a weight. Sums
// have the same order as those of lanes and of panels, to the bit. Part of products_lanes.h.
#pragma once

namespace chatterm {
namespace {

typedef uint32_t PanelBits __attribute__((vector_size(64)));  // four bytes of each row

// A block of PANEL rows that are stored one after the other.
struct PanelApart {
  const uint8_t* const* rows;
  ptrdiff_t block;

  Apart half(int side) const { return {rows + side * LANES, block}; }
  // 16 bytes of each row: out[i] has bytes 4 * i.. of each.
  void sixteen(int at, PanelBits* out) const {
    __m512i v[4];
    CT_UNROLL
    for (int r = 0; r < 4; ++r) {
      auto load = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + block + at)); };
      v[r] = _mm512_castsi128_si512(load(r));
      v[r] = _mm512_inserti32x4(v[r], load(r + 4), 1);
      v[r] = _mm512_inserti32x4(v[r], load(r + 8), 2);
      v[r] = _mm512_inserti32x4(v[r], load(r + 12), 3);
    }
    const __m512i low = _mm512_unpacklo_epi32(v[0], v[1]), high = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i low2 = _mm512_unpacklo_epi32(v[2], v[3]), high2 = _mm512_unpackhi_epi32(v[2], v[3]);
    out[0] = (PanelBits)_mm512_unpacklo_epi64(low, low2);
    out[1] = (PanelBits)_mm512_unpackhi_epi64(low, low2);
    out[2] = (PanelBits)_mm512_unpacklo_epi64(high, high2);
    out[3] = (PanelBits)_mm512_unpackhi_epi64(high, high2);
  }
};

// The same for interleaved rows.
template <int TYPE>
struct PanelInterleaved {
  const uint8_t* block;

  Interleaved<TYPE> half(int side) const { return {block, side * LANES}; }
  void sixteen(int at, PanelBits* out) const {
    CT_UNROLL
    for (int i = 0; i < 4; ++i) {
      out[i] = (PanelBits)_mm512_loadu_si512(block + InterleavedBlock<TYPE>::word(at + 4 * i));
    }
  }
};

inline __m512 joined(LaneFloats first, LaneFloats second) {
  return _mm512_insertf32x8(_mm512_castps256_ps512((__m256)first), (__m256)second, 1);
}

// The digits of a block, four per row and vector.
template <int TYPE, typename From>
inline void panel_digits(const From& from, PanelBits* out) {
  constexpr int FIRST = Lanes<TYPE>::BYTES - (TYPE == CT_Q8_0 ? 32 : 16);
  from.sixteen(FIRST, out);
  if (TYPE == CT_Q8_0) from.sixteen(FIRST + 16, out + 4);
  CT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const PanelBits packed = out[i];
    out[i] = TYPE == CT_Q8_0 ? packed ^ 0x80808080u : packed & 0x0f0f0f0fu;
    out[i + 4] = TYPE == CT_Q8_0 ? out[i + 4] ^ 0x80808080u : packed >> 4 & 0x0f0f0f0fu;
  }
  if (TYPE != CT_MXFP4) return;
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)MXFP4_DIGITS));
  CT_UNROLL
  for (int i = 0; i < 8; ++i) out[i] = (PanelBits)_mm512_shuffle_epi8(table, (__m512i)out[i]);
}

// Multiplies PANEL rows with N rows of inputs; from(b) gives block b.
template <int TYPE, int N, typename From>
inline void multiply_panel_rows(From from, int32_t columns, Fetch& fetch, const Inputs& x, __m512* sums) {
  constexpr int WIDE = wide_of(N);
  CT_UNROLL
  for (int r = 0; r < N; ++r) sums[r] = _mm512_setzero_ps();
  for (int32_t b = 0; b < columns / 32; ++b) {
    fetch.go_on<Lanes<TYPE>::BYTES * PANEL>();
    const auto rows = from(b);
    Lanes<TYPE> left, right;
    left.open(rows.half(0));
    right.open(rows.half(1));
    PanelBits digits[8];
    panel_digits<TYPE>(rows, digits);
    __m512i dots[N];
    CT_UNROLL
    for (int r = 0; r < N; ++r) dots[r] = _mm512_setzero_si512();
    CT_UNROLL
    for (int j = 0; j < 8; ++j) {
      CT_UNROLL
      for (int r = 0; r < N; ++r) {
        const __m512i four = _mm512_set1_epi32(int32_t(x.q[(8 * b + j) * WIDE + r]));
        dots[r] = _mm512_dpbusd_epi32(dots[r], (__m512i)digits[j], four);
      }
    }
    const __m512 scale = joined(left.scale(0), right.scale(0)), low = joined(left.low(0), right.low(0));
    CT_UNROLL
    for (int r = 0; r < N; ++r) {
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x.scale[b * WIDE + r]));
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), both, sums[r]);
      sums[r] = _mm512_fmadd_ps(low, _mm512_set1_ps(x.low[b * WIDE + r]), sums[r]);
    }
  }
}

template <int TYPE, int N>
void multiply_panels(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  const size_t bytes = rows.row_bytes;
  Fetch fetch = fetch_of(rows, PANEL * bytes);
  for (int32_t first = 0; first < rows.count; first += PANEL) {
    const uint8_t* some[PANEL];
    for (int32_t r = 0; r < PANEL; ++r) {  // missing rows repeat the last one
      some[r] = rows.data + size_t(first + r < rows.count ? first + r : rows.count - 1) * bytes;
    }
    auto from = [&](int32_t b) { return PanelApart{some, ptrdiff_t(b) * Lanes<TYPE>::BYTES}; };
    __m512 sums[N];
    multiply_panel_rows<TYPE, N>(from, rows.columns, fetch, x, sums);
    const int32_t left = rows.count - first, found = left < PANEL ? left : PANEL;
    for (int32_t r = 0; r < x.rows; ++r) std::memcpy(out + r * stride + first, &sums[r], size_t(found) * sizeof(float));
  }
}

template <int TYPE, int N>
void multiply_interleaved_panels(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  Fetch fetch = fetch_of(rows, 0);
  for (int32_t first = 0; first < rows.count; first += PANEL) {
    const uint8_t* panel = rows.data + size_t(first) * rows.row_bytes;
    auto from = [&](int32_t b) { return PanelInterleaved<TYPE>{panel + ptrdiff_t(b) * Lanes<TYPE>::BYTES * PANEL}; };
    __m512 sums[N];
    multiply_panel_rows<TYPE, N>(from, rows.columns, fetch, x, sums);
    for (int32_t r = 0; r < x.rows; ++r) _mm512_storeu_ps(out + r * stride + first, sums[r]);
  }
}

}  // namespace
}  // namespace chatterm
