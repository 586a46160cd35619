// Products of many rows of activations: 16 rows of a weight are unpacked side by side and multiplied with all of them.
// In plain C++ that was half as fast as products of TILE rows at a time.
//
// A weight is scale * digit + low in every format, with one scale and one low for 32 numbers (for 16 in Q6_K).
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

// Stores number r of a group's scales and lows.
inline void place_scale(float scale, float low, int32_t group, int32_t r, Panel& out) {
  out.scale[group * PANEL + r] = scale;
  out.low[group * PANEL + r] = low;
}

}  // namespace
}  // namespace chatterm

#include "unpack_avx2.h"

namespace chatterm {
namespace {

void unpack(const ct_matrix& matrix, int32_t first, int32_t count, Panel& out) {
  out.type = matrix.type;
  out.columns = matrix.columns;
  if (matrix.storage == CT_INTERLEAVED) {
    return by_small_blocks(matrix.type, [&](auto type) { unpack_interleaved<type.value>(matrix, first, out); });
  }
  by_blocks(matrix.type, [&](auto type) { unpack_as<type.value>(matrix, first, count, out); });
}

// One tile of the inputs, as a product reads it.
struct InputTile {
  const uint32_t* q;   // [columns / 4][TILE]
  const float* scale;  // [columns / 32][TILE]
  const float* low;    // [groups][TILE]
};

}  // namespace
}  // namespace chatterm

#if defined(__AVX512VNNI__)
#include "panels_avx512.h"
#else
#include "panels_avx2.h"
#endif

namespace chatterm {
namespace {

void multiply_panel(const Panel& panel, const Inputs& x, float* out, int32_t stride) {
  const int64_t n = panel.columns;
  const bool sixteens = panel.type == CT_Q6_K;
  for (int32_t row = 0; row < x.rows; row += TILE, out += TILE * stride) {
    const int64_t tile = row / TILE;
    const InputTile given{x.q + tile * (n / 4) * TILE, x.scale + tile * (n / 32) * TILE,
                          sixteens ? x.low_16 + tile * (n / 16) * TILE : x.low + tile * (n / 32) * TILE};
    if (x.rows - row > TILE / 2) {
      multiply_tile<TILE>(panel, given, out, stride);
    } else {
      multiply_tile<TILE / 2>(panel, given, out, stride);
    }
  }
}

}  // namespace
}  // namespace chatterm
