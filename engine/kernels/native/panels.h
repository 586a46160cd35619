// Products of many rows of activations: 16 rows of a weight are unpacked side by side and multiplied with all of them.
//
// A weight is scale * digit + low in every format, with one scale and one low for 32 numbers (for 16 in Q6_K).
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

// Number r of a group's scales and lows
inline void place_scale(float scale, float low, int32_t group, int32_t r, Panel& out) {
  out.scale[group * PANEL + r] = scale;
  out.low[group * PANEL + r] = low;
}

}  // namespace
}  // namespace chatterm

#ifdef __AVX2__
#include "unpack_avx2.h"
#else
#include "unpack_portable.h"
#endif

namespace chatterm {
namespace {

// Columns first..first + count (multiples of 32) of row r of a grid with n columns, from as many numbers: the int8 of
// `quantize`, with the sums that belong to the lows.
void quantize_part(const float* x, int32_t n, int32_t r, int32_t first, int32_t count, Grid& out) {
  const int32_t tile = r / TILE, place = r % TILE;
  uint32_t* q = out.q + int64_t(tile) * (n / 4) * TILE + place;
  float* scale = out.scale + int64_t(tile) * (n / 32) * TILE + place;
  float* low = out.low + int64_t(tile) * (n / 32) * TILE + place;
  float* low_16 = out.low_16 + int64_t(tile) * (n / 16) * TILE + place;
  for (int32_t b = first / 32; b < (first + count) / 32; ++b, x += 32) {
    int8_t numbers[32];
    int32_t left, right;
    const float step = quantize_block(x, numbers, left, right);
    for (int i = 0; i < 8; ++i) q[(8 * b + i) * TILE] = load_u32(numbers + 4 * i);
    scale[b * TILE] = step;
    low[b * TILE] = step * float(left + right);
    low_16[2 * b * TILE] = step * float(left);
    low_16[(2 * b + 1) * TILE] = step * float(right);
  }
}

// One tile of the grid as a product reads it.
struct GridTile {
  const uint32_t* q;   // [columns / 4][TILE]
  const float* scale;  // [columns / 32][TILE]
  const float* low;    // [groups][TILE]
};

}  // namespace
}  // namespace chatterm

#if defined(__AVX512VNNI__)
#include "panels_avx512.h"
#elif defined(__AVX2__)
#include "panels_avx2.h"
#else
#include "panels_portable.h"
#endif

namespace chatterm {
namespace {

void multiply_panel(const Panel& panel, const Grid& grid, int32_t rows, float* out) {
  const int64_t n = panel.columns;
  const bool sixteens = panel.type == CT_Q6_K;
  for (int32_t row = 0; row < rows; row += TILE, out += TILE * PANEL) {
    const int64_t tile = row / TILE;
    const GridTile given{grid.q + tile * (n / 4) * TILE, grid.scale + tile * (n / 32) * TILE,
                         sixteens ? grid.low_16 + tile * (n / 16) * TILE : grid.low + tile * (n / 32) * TILE};
    if (rows - row > TILE / 2) {
      multiply_tile<TILE>(panel, given, out);
    } else {
      multiply_tile<TILE / 2>(panel, given, out);
    }
  }
}

}  // namespace
}  // namespace chatterm
