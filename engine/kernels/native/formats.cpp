// The types: their blocks, what they are multiplied with, and single rows as numbers.
#include "formats.h"

#include "kernels.h"

namespace chatterm {

int32_t form_of(int32_t type) {
  const int32_t block = shape_of(type).numbers;
  return block == 0 ? 0 : block == 1 ? FORM_FLOAT : FORM_INT8;
}

bool is_sound(const ct_matrix& matrix) {
  const auto [block, bytes] = shape_of(matrix.type);
  return block > 0 && matrix.data != nullptr && matrix.rows > 0 && matrix.columns > 0 &&
         matrix.columns % block == 0 && matrix.row_bytes == int64_t(matrix.columns / block) * bytes;
}

namespace {

void k_row(int32_t type, const uint8_t* block, float* out) {
  uint8_t digits[256];
  (type == CT_Q4_K ? q4_k_digits : q5_k_digits)(block, digits);
  const float d = load_half(block), low = load_half(block + 2);
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    k_scale(block + 4, j, scale, minimum);
    const float step = d * float(scale), least = low * float(minimum);
    for (int i = 32 * j; i < 32 * j + 32; ++i) out[i] = step * float(digits[i]) - least;
  }
}

void q6_k_row(const uint8_t* block, float* out) {
  uint8_t digits[256];
  q6_k_digits(block, digits);
  const float d = load_half(block + 208);
  for (int j = 0; j < 16; ++j) {
    const float step = d * float(int8_t(block[192 + j]));
    for (int i = 16 * j; i < 16 * j + 16; ++i) out[i] = step * float(int(digits[i]) - 32);
  }
}

}  // namespace

void dequantize_row(int32_t type, const uint8_t* row, int32_t columns, float* out) {
  const auto [block, bytes] = shape_of(type);
  for (int32_t at = 0; at < columns; at += block, row += bytes, out += block) {
    switch (type) {
      case CT_F32:
        *out = as_float(load_u32(row));
        break;
      case CT_F16:
        *out = load_half(row);
        break;
      case CT_BF16:
        *out = load_bf16(row);
        break;
      case CT_Q8_0: {
        const float d = load_half(row);
        for (int i = 0; i < 32; ++i) out[i] = d * float(int8_t(row[2 + i]));
        break;
      }
      case CT_Q4_0:
      case CT_Q4_1: {
        const bool with_minimum = type == CT_Q4_1;
        const float d = load_half(row), low = with_minimum ? load_half(row + 2) : -8.0f * d;
        const uint8_t* packed = row + (with_minimum ? 4 : 2);
        for (int i = 0; i < 16; ++i) {
          out[i] = d * float(packed[i] & 15) + low;
          out[i + 16] = d * float(packed[i] >> 4) + low;
        }
        break;
      }
      case CT_Q6_K:
        q6_k_row(row, out);
        break;
      default:
        k_row(type, row, out);
    }
  }
}

}  // namespace chatterm
