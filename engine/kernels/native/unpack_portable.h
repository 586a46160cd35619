// Rows of a weight to panels in plain C++. Part of panels.h.
#pragma once

namespace chatterm {
namespace {

// `count` digits of row r of the panel, which are those of its columns from `column` on
inline void place_digits(const uint8_t* digits, int32_t count, int32_t column, int32_t r, Panel& out) {
  uint32_t* to = out.digits + column / 4 * PANEL + r;
  for (int32_t i = 0; i < count / 4; ++i) to[i * PANEL] = load_u32(digits + 4 * i);
}

inline void unpack_nibbles(const uint8_t* packed, int32_t b, int32_t r, Panel& out) {
  uint8_t digits[32];
  for (int i = 0; i < 16; ++i) {
    digits[i] = packed[i] & 15;
    digits[i + 16] = packed[i] >> 4;
  }
  place_digits(digits, 32, 32 * b, r, out);
}

// Q4_K and Q5_K
inline void unpack_k(bool fifth, const uint8_t* block, int32_t b, int32_t r, Panel& out) {
  uint8_t digits[256];
  (fifth ? q5_k_digits : q4_k_digits)(block, digits);
  place_digits(digits, 256, 256 * b, r, out);
  const float d = load_half(block), low = load_half(block + 2);
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    k_scale(block + 4, j, scale, minimum);
    place_scale(d * float(scale), -low * float(minimum), 8 * b + j, r, out);
  }
}

inline void unpack_q6_k(const uint8_t* block, int32_t b, int32_t r, Panel& out) {
  uint8_t digits[256];
  q6_k_digits(block, digits);
  place_digits(digits, 256, 256 * b, r, out);
  const float d = load_half(block + 208);
  for (int j = 0; j < 16; ++j) {
    const float scale = d * float(int8_t(block[192 + j]));
    place_scale(scale, -32.0f * scale, 16 * b + j, r, out);
  }
}

inline void unpack_block(int32_t type, const uint8_t* block, int32_t b, int32_t r, Panel& out) {
  switch (type) {
    case CT_Q4_0: {
      const float scale = load_half(block);
      place_scale(scale, -8.0f * scale, b, r, out);
      return unpack_nibbles(block + 2, b, r, out);
    }
    case CT_Q4_1:
      place_scale(load_half(block), load_half(block + 2), b, r, out);
      return unpack_nibbles(block + 4, b, r, out);
    case CT_Q8_0: {
      const float scale = load_half(block);
      place_scale(scale, -128.0f * scale, b, r, out);
      uint8_t digits[32];
      for (int i = 0; i < 32; ++i) digits[i] = block[2 + i] ^ 0x80;
      return place_digits(digits, 32, 32 * b, r, out);
    }
    case CT_Q6_K:
      return unpack_q6_k(block, b, r, out);
    default:
      return unpack_k(type == CT_Q5_K, block, b, r, out);
  }
}

void unpack(const ct_matrix& matrix, int32_t first, int32_t count, Panel& out) {
  out.type = matrix.type;
  out.columns = matrix.columns;
  const int32_t size = block_of(matrix.type), bytes = block_bytes_of(matrix.type);
  const uint8_t* row = matrix.data + int64_t(first) * matrix.row_bytes;
  // What a panel lacks of 16 rows keeps the digits of another; nobody reads its outputs.
  for (int32_t r = 0; r < count; ++r, row += matrix.row_bytes) {
    for (int32_t b = 0; b < matrix.columns / size; ++b) unpack_block(matrix.type, row + b * bytes, b, r, out);
  }
}

}  // namespace
}  // namespace chatterm
