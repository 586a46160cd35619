// Products with quantised rows in plain C++: correct on every machine, fast on none.
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

inline void add_fours(const int8_t* q, int32_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = q[4 * i] + q[4 * i + 1] + q[4 * i + 2] + q[4 * i + 3];
}

template <int COUNT>
inline int32_t dot_of(const uint8_t* digits, const int8_t* q) {
  int32_t dot = 0;
  for (int i = 0; i < COUNT; ++i) dot += int32_t(digits[i]) * q[i];
  return dot;
}

template <int TYPE>
void multiply_rows(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  using B = Block<TYPE>;
  const float* lows = B::GROUP == 32 ? x.low : x.low_16;
  for (int32_t i = 0; i < rows.count; ++i) {
    const uint8_t* row = rows.data + size_t(i) * rows.row_bytes;
    float sums[TILE] = {};
    for (int32_t b = 0; b < rows.columns / B::SIZE; ++b) {
      const B block(row + b * B::BYTES);
      for (int32_t r = 0; r < x.rows; ++r) {
        for (int32_t g = 0; g < B::GROUPS; ++g) {
          const int32_t group = b * B::GROUPS + g;
          const uint32_t* from = x.q + group * B::GROUP / 4 * x.wide + r;
          uint32_t q[B::GROUP / 4];
          for (int32_t k = 0; k < B::GROUP / 4; ++k) q[k] = from[k * x.wide];
          const float dot = float(dot_of<B::GROUP>(block.digits + g * B::GROUP, (const int8_t*)q));
          const float step = x.scale[group * B::GROUP / 32 * x.wide + r];
          sums[r] += block.scale[g] * step * dot + block.low[g] * lows[group * x.wide + r];
        }
      }
    }
    for (int32_t r = 0; r < x.rows; ++r) out[r * stride + i] = sums[r];
  }
}

}  // namespace
}  // namespace chatterm
