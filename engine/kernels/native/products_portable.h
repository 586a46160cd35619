// Products with quantised rows in plain C++: right on every machine, fast on none.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

inline void add_fours(const int8_t* q, int32_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = q[4 * i] + q[4 * i + 1] + q[4 * i + 2] + q[4 * i + 3];
}

// Calls block(row's block, index) for every block and adds up what it returns.
template <int SIZE, int BYTES, typename Block>
inline void each_block(const Rows& rows, float* out, Block block) {
  for (int32_t r = 0; r < rows.count; ++r) {
    const uint8_t* row = rows.data + size_t(r) * rows.row_bytes;
    float sum = 0.0f;
    for (int32_t b = 0; b < rows.columns / SIZE; ++b) sum += block(row + b * BYTES, b);
    out[r] = sum;
  }
}

inline int32_t nibble_dot(const uint8_t* packed, const int8_t* q) {
  int32_t dot = 0;
  for (int i = 0; i < 16; ++i) dot += int32_t(packed[i] & 15) * q[i] + int32_t(packed[i] >> 4) * q[i + 16];
  return dot;
}

void multiply_q4_0(const Rows& rows, const Activation& x, float* out) {
  each_block<32, Q4_0_BYTES>(rows, out, [&](const uint8_t* block, int32_t b) {
    const float dot = x.scale[b] * float(nibble_dot(block + 2, x.q + 32 * b));
    return load_half(block) * (dot - 8.0f * x.low[b]);
  });
}

void multiply_q4_1(const Rows& rows, const Activation& x, float* out) {
  each_block<32, Q4_1_BYTES>(rows, out, [&](const uint8_t* block, int32_t b) {
    const float dot = x.scale[b] * float(nibble_dot(block + 4, x.q + 32 * b));
    return load_half(block) * dot + load_half(block + 2) * x.low[b];
  });
}

void multiply_q8_0(const Rows& rows, const Activation& x, float* out) {
  each_block<32, Q8_0_BYTES>(rows, out, [&](const uint8_t* block, int32_t b) {
    int32_t dot = 0;
    for (int i = 0; i < 32; ++i) dot += int32_t(int8_t(block[2 + i])) * x.q[32 * b + i];
    return load_half(block) * x.scale[b] * float(dot);
  });
}

// Q4_K and Q5_K, which differ in their digits only.
inline float k_block(const uint8_t* block, const uint8_t* digits, const Activation& x, int32_t b) {
  float total = 0.0f, low = 0.0f;
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    k_scale(block + 4, j, scale, minimum);
    int32_t dot = 0;
    for (int i = 0; i < 32; ++i) dot += int32_t(digits[32 * j + i]) * x.q[256 * b + 32 * j + i];
    total += float(scale) * (x.scale[8 * b + j] * float(dot));
    low += float(minimum) * x.low[8 * b + j];
  }
  return load_half(block) * total - load_half(block + 2) * low;
}

void multiply_q4_k(const Rows& rows, const Activation& x, float* out) {
  each_block<256, Q4_K_BYTES>(rows, out, [&](const uint8_t* block, int32_t b) {
    uint8_t digits[256];
    q4_k_digits(block, digits);
    return k_block(block, digits, x, b);
  });
}

void multiply_q5_k(const Rows& rows, const Activation& x, float* out) {
  each_block<256, Q5_K_BYTES>(rows, out, [&](const uint8_t* block, int32_t b) {
    uint8_t digits[256];
    q5_k_digits(block, digits);
    return k_block(block, digits, x, b);
  });
}

void multiply_q6_k(const Rows& rows, const Activation& x, float* out) {
  each_block<256, Q6_K_BYTES>(rows, out, [&](const uint8_t* block, int32_t b) {
    uint8_t digits[256];
    q6_k_digits(block, digits);
    float total = 0.0f;
    for (int j = 0; j < 16; ++j) {
      int32_t dot = 0;
      for (int i = 0; i < 16; ++i) dot += (int32_t(digits[16 * j + i]) - 32) * x.q[256 * b + 16 * j + i];
      total += float(int8_t(block[192 + j])) * (x.scale[8 * b + j / 2] * float(dot));
    }
    return load_half(block + 208) * total;
  });
}

}  // namespace
}  // namespace chatterm
