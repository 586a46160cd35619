// Panels in plain C++. Part of panels.h.
#pragma once

namespace chatterm {
namespace {

template <int ROWS>
void multiply_tile(const Panel& panel, const InputTile& x, float* out, int32_t stride) {
  const int32_t group = panel.type == CT_Q6_K ? 16 : 32, fours = group / 4;
  float sums[ROWS][PANEL] = {};
  for (int32_t g = 0; g < panel.columns / group; ++g) {
    for (int32_t r = 0; r < ROWS; ++r) {
      int32_t dots[PANEL] = {};
      for (int32_t i = g * fours; i < (g + 1) * fours; ++i) {
        int8_t q[4];
        std::memcpy(q, x.q + i * TILE + r, sizeof q);
        for (int32_t p = 0; p < PANEL; ++p) {
          uint8_t w[4];
          std::memcpy(w, panel.digits + i * PANEL + p, sizeof w);
          dots[p] += w[0] * q[0] + w[1] * q[1] + w[2] * q[2] + w[3] * q[3];
        }
      }
      const float step = x.scale[g * group / 32 * TILE + r], low = x.low[g * TILE + r];
      for (int32_t p = 0; p < PANEL; ++p) {
        sums[r][p] += panel.scale[g * PANEL + p] * step * float(dots[p]) + panel.low[g * PANEL + p] * low;
      }
    }
  }
  for (int32_t r = 0; r < ROWS; ++r) std::memcpy(out + r * stride, sums[r], sizeof sums[r]);
}

}  // namespace
}  // namespace chatterm
