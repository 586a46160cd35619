// Panels for AVX-512 with VNNI: a vector holds four columns of all 16 rows. Part of panels.h.
#pragma once

namespace chatterm {
namespace {

template <int GROUP, int ROWS>
void multiply_groups(const Panel& panel, const InputTile& x, float* out, int32_t stride) {
  constexpr int FOURS = GROUP / 4;
  __m512 sums[ROWS];
  CT_UNROLL
  for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps();
  for (int32_t g = 0; g < panel.columns / GROUP; ++g) {
    const uint32_t* digits = panel.digits + g * FOURS * PANEL;
    const uint32_t* q = x.q + g * FOURS * TILE;
    __m512i dots[ROWS];
    CT_UNROLL
    for (int r = 0; r < ROWS; ++r) dots[r] = _mm512_setzero_si512();
    CT_UNROLL
    for (int i = 0; i < FOURS; ++i) {
      const __m512i w = _mm512_loadu_si512(digits + i * PANEL);
      CT_UNROLL
      for (int r = 0; r < ROWS; ++r) {
        dots[r] = _mm512_dpbusd_epi32(dots[r], w, _mm512_set1_epi32(int32_t(q[i * TILE + r])));
      }
    }
    const __m512 scale = _mm512_loadu_ps(panel.scale + g * PANEL), low = _mm512_loadu_ps(panel.low + g * PANEL);
    const float* steps = x.scale + g * GROUP / 32 * TILE;
    const float* lows = x.low + g * TILE;
    CT_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), _mm512_mul_ps(scale, _mm512_set1_ps(steps[r])), sums[r]);
      sums[r] = _mm512_fmadd_ps(low, _mm512_set1_ps(lows[r]), sums[r]);
    }
  }
  CT_UNROLL
  for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(out + r * stride, sums[r]);
}

template <int ROWS>
void multiply_tile(const Panel& panel, const InputTile& x, float* out, int32_t stride) {
  (panel.type == CT_Q6_K ? multiply_groups<16, ROWS> : multiply_groups<32, ROWS>)(panel, x, out, stride);
}

}  // namespace
}  // namespace chatterm
