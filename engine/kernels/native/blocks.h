// A block of a quantised row in plain C++, for every format.
#pragma once

#include "formats.h"

namespace chatterm {
namespace {

// A block's digits, with a scale and a low for each group of columns: a number is scale * digit + low.
template <int TYPE>
struct Block {
  static constexpr int SIZE = shape_of(TYPE).numbers, BYTES = shape_of(TYPE).bytes;
  static constexpr int GROUP = TYPE == CT_Q6_K ? 16 : 32, GROUPS = SIZE / GROUP;
  // The digit that stands for 0, in formats without minima.
  static constexpr int ZERO = TYPE == CT_MXFP4  ? MXFP4_ZERO
                              : TYPE == CT_Q4_0 ? 8
                              : TYPE == CT_Q8_0 ? 128
                              : TYPE == CT_Q6_K ? 32
                                                : 0;
  uint8_t digits[SIZE];
  float scale[GROUPS], low[GROUPS];

  explicit Block(const uint8_t* block) {
    if constexpr (TYPE == CT_Q4_0 || TYPE == CT_Q4_1) {
      scale[0] = load_half(block);
      low[0] = TYPE == CT_Q4_1 ? load_half(block + 2) : 0.0f;
      const uint8_t* packed = block + BYTES - 16;
      for (int i = 0; i < 16; ++i) {
        digits[i] = packed[i] & 15;
        digits[i + 16] = packed[i] >> 4;
      }
    } else if constexpr (TYPE == CT_Q8_0) {
      scale[0] = load_half(block);
      for (int i = 0; i < 32; ++i) digits[i] = block[2 + i] ^ 0x80;
    } else if constexpr (TYPE == CT_MXFP4) {
      scale[0] = mxfp4_scale(block[0]);
      for (int i = 0; i < 16; ++i) {
        digits[i] = MXFP4_DIGITS[block[1 + i] & 15];
        digits[i + 16] = MXFP4_DIGITS[block[1 + i] >> 4];
      }
    } else if constexpr (TYPE == CT_Q6_K) {
      q6_k_digits(block, digits);
      const float d = load_half(block + 208);
      for (int j = 0; j < 16; ++j) scale[j] = d * float(int8_t(block[192 + j]));
    } else {
      (TYPE == CT_Q5_K ? q5_k_digits : q4_k_digits)(block, digits);
      const float d = load_half(block), least = load_half(block + 2);
      for (int j = 0; j < 8; ++j) {
        int step, minimum;
        k_scale(block + 4, j, step, minimum);
        scale[j] = d * float(step);
        low[j] = -least * float(minimum);
      }
    }
    for (int g = 0; g < GROUPS && ZERO; ++g) low[g] = float(-ZERO) * scale[g];
  }

  float number(int i) const {
    const float digit = float(int(digits[i]) - ZERO) * scale[i / GROUP];
    return ZERO ? digit : digit + low[i / GROUP];
  }
};

}  // namespace
}  // namespace chatterm
