// The types: their blocks, the form of their inputs, and the expansion of single rows.
#include "blocks.h"
#include "kernels.h"

namespace chatterm {

int32_t form_of(int32_t type) {
  const int32_t block = shape_of(type).numbers;
  return block == 0 ? 0 : block == 1 ? type == CT_BF16 ? FORM_FLOAT | FORM_HALVES : FORM_FLOAT : FORM_INT8;
}

bool is_sound(const ct_matrix& matrix) {
  const auto [block, bytes] = shape_of(matrix.type);
  return block > 0 && matrix.data != nullptr && matrix.rows > 0 && matrix.columns > 0 &&
         matrix.columns % block == 0 && (matrix.storage != CT_INTERLEAVED || (is_small(matrix.type) && matrix.rows % PANEL == 0)) && matrix.row_bytes == int64_t(matrix.columns / block) * bytes;
}

namespace {

template <int TYPE>
void dequantize_blocks(const uint8_t* row, int32_t columns, float* out) {
  using B = Block<TYPE>;
  for (int32_t b = 0; b < columns / B::SIZE; ++b, out += B::SIZE) {
    const B block(row + b * B::BYTES);
    for (int i = 0; i < B::SIZE; ++i) out[i] = block.number(i);
  }
}

}  // namespace

void dequantize_row(int32_t type, const uint8_t* row, int32_t columns, float* out) {
  if (form_of(type) == FORM_INT8) {
    return by_blocks(type, [&](auto blocks) { dequantize_blocks<blocks.value>(row, columns, out); });
  }
  for (int32_t i = 0; i < columns; ++i) {
    out[i] = type == CT_F32    ? as_float(load_u32(row + 4 * i))
             : type == CT_BF16 ? load_bf16(row + 2 * i)
                               : load_half(row + 2 * i);
  }
}

}  // namespace chatterm
