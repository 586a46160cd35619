// Numbers of a quantised KV cache: one byte each, with an fp32 scale for each head of a row, behind the numbers of all
// heads. The twin of engine/cache/kv_rows.py. Scores are multiplied by K's scales and weights by V's everywhere, so
// that a query gets the same bits alone and in a chunk. Part of kernels_impl.h.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

struct Bytes8 {
  static constexpr int BYTES = 1;
  static constexpr bool SCALED = true;
};

struct Int8 : Bytes8 {
  static Floats eight(const uint8_t* p) { return to_floats(widen_bytes<true>(p)); }
  static uint8_t code(float x) {
    const float rounded = x + 12582912.0f;  // 1.5 * 2^23: rounds half to even
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return uint8_t(bits);
  }
  static void factors(float most, float& scale, float& inverse) {
    scale = most > 1e-30f ? most * float(1.0 / 127.0) : 0.0f;
    inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  }
};

// E4M3: its bits, placed in an fp32, are the number divided by 2^120. The scale is a power of two.
struct Fp8 : Bytes8 {
  static Floats eight(const uint8_t* p) {
    const Ints v = widen_bytes<false>(p);
    return (Floats)(((v & 0x80) << 24) | ((v & 0x7f) << 20)) * 0x1p120f;
  }
  static uint8_t code(float x) {
    const float small = x * 0x1p-120f;
    uint32_t bits;
    std::memcpy(&bits, &small, sizeof bits);
    const uint32_t size = bits & 0x7fffffffu;
    return uint8_t((size + 0x7ffffu + (size >> 20 & 1)) >> 20 | (bits >> 24 & 0x80));
  }
  static void factors(float most, float& scale, float& inverse) {
    int32_t bits;
    std::memcpy(&bits, &most, sizeof bits);
    const int32_t exponent = (bits >> 23) - 7;
    const int32_t up = exponent > 0 ? exponent << 23 : 0, down = exponent > 0 ? (254 - exponent) << 23 : 0;
    std::memcpy(&scale, &up, sizeof scale);
    std::memcpy(&inverse, &down, sizeof inverse);
  }
};

inline float scale_at(const uint8_t* p) {
  float scale;
  std::memcpy(&scale, p, sizeof scale);
  return scale;
}

// Multiplies each of `lines` lines of scores or weights by the scales of their rows.
inline void scale_rows(float* scores, int32_t lines, int32_t count, const uint8_t* const* rows, int64_t scales) {
  float factors[ATTEND_ROWS];
  for (int32_t r = 0; r < count; ++r) factors[r] = scale_at(rows[r] + scales);
  for (int32_t i = 0; i < lines; ++i) {
    for (int32_t r = 0; r < count; ++r) scores[i * ATTEND_ROWS + r] *= factors[r];
  }
}

// Stores numbers [heads, dim] as bytes in `out`, and their scales in `scales`.
template <typename Type>
inline void store_bytes(const float* x, int32_t heads, int32_t dim, uint8_t* out, uint8_t* scales) {
  for (int32_t h = 0; h < heads; ++h, x += dim, out += dim) {
    float most = 0.0f, scale, inverse;
    for (int32_t i = 0; i < dim; ++i) most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most;
    Type::factors(most, scale, inverse);
    for (int32_t i = 0; i < dim; ++i) out[i] = Type::code(x[i] * inverse);
    std::memcpy(scales + 4 * h, &scale, sizeof scale);
  }
}

}  // namespace
}  // namespace chatterm
