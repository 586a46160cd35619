// Products of many rows of activations: 16 rows of a weight are unpacked side by side and multiplied with all of them.
// In plain C++ that was half as fast as products of TILE rows at a time.
//
// A weight is scale * digit + low in every format, with one scale and one low for 32 numbers (for 16 in Q6_K).
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

// Unpacks block b of LANES rows to those of a panel from `side` on.
template <int TYPE, typename From>
inline void unpack_block(const From& rows, int32_t b, int32_t side, Panel& out) {
  using L = Lanes<TYPE>;
  constexpr int GROUPS = 32 / L::GROUP;
  L lanes;
  lanes.open(rows);
  CT_UNROLL
  for (int part = 0; part < L::PARTS; ++part) {
    const int32_t n = b * L::PARTS + part;
    LaneBits digits[8];
    lanes.digits(rows, part, digits);
    place_digits(digits, out.digits + 8 * n * PANEL, side);
    CT_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      store_as(out.scale + (n * GROUPS + g) * PANEL + side, lanes.scale(part * GROUPS + g));
      store_as(out.low + (n * GROUPS + g) * PANEL + side, lanes.low(part * GROUPS + g));
    }
  }
}

// Unpacks a whole panel of interleaved rows, from row `first` on.
template <int TYPE>
void unpack_interleaved(const ct_matrix& matrix, int32_t first, Panel& out) {
  constexpr int BYTES = PANEL * shape_of(TYPE).bytes;
  const uint8_t* block = matrix.data + int64_t(first) * matrix.row_bytes;
  for (int32_t b = 0; b < matrix.columns / 32; ++b, block += BYTES) {
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch((const char*)(uintptr_t(block) + uintptr_t(i) + LANES_AHEAD));
    for (int32_t side = 0; side < PANEL; side += LANES) {
      unpack_block<TYPE>(Interleaved<TYPE>{block, side}, b, side, out);
    }
  }
}

}  // namespace
}  // namespace chatterm

#ifdef __AVX2__
#include "unpack_avx2.h"
#else

namespace chatterm {
namespace {

template <int TYPE>
void unpack_as(const ct_matrix& matrix, int32_t first, int32_t count, Panel& out) {
  for (int32_t side = 0; side < count; side += LANES) {
    const uint8_t* rows[LANES];
    for (int32_t r = 0; r < LANES; ++r) {  // missing rows of a panel repeat the last one; their outputs are unused
      const int32_t row = side + r < count ? side + r : count - 1;
      rows[r] = matrix.data + int64_t(first + row) * matrix.row_bytes;
    }
    for (int32_t b = 0; b < matrix.columns / 32 / Lanes<TYPE>::PARTS; ++b) {
      const Apart block{rows, ptrdiff_t(b) * Lanes<TYPE>::BYTES};
      const auto ahead = uintptr_t(LANES * matrix.row_bytes);
      for (int32_t r = 0; r < LANES; ++r) __builtin_prefetch((const char*)(uintptr_t(block.of(r, 0)) + ahead));
      unpack_block<TYPE>(block, b, side, out);
    }
  }
}

}  // namespace
}  // namespace chatterm

#endif

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
#elif defined(__AVX2__)
#include "panels_avx2.h"
#else
#include "panels_neon.h"
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
