// Unpacks rows of a weight to panels in plain C++. Part of panels.h.
#pragma once

namespace chatterm {
namespace {

template <int TYPE>
void unpack_as(const ct_matrix& matrix, int32_t first, int32_t count, Panel& out) {
  using B = Block<TYPE>;
  const uint8_t* row = matrix.data + int64_t(first) * matrix.row_bytes;
  // Missing rows of a panel keep earlier digits; their outputs are unused.
  for (int32_t r = 0; r < count; ++r, row += matrix.row_bytes) {
    for (int32_t b = 0; b < matrix.columns / B::SIZE; ++b) {
      const B block(row + b * B::BYTES);
      uint32_t* to = out.digits + b * B::SIZE / 4 * PANEL + r;
      for (int32_t i = 0; i < B::SIZE / 4; ++i) to[i * PANEL] = load_u32(block.digits + 4 * i);
      for (int32_t g = 0; g < B::GROUPS; ++g) place_scale(block.scale[g], block.low[g], b * B::GROUPS + g, r, out);
    }
  }
}

}  // namespace
}  // namespace chatterm
