// Eight floats at once: a vector of AVX2, or a pair of vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"

#ifdef __AVX2__
#include "eights_avx2.h"
#else
#include "pairs.h"
#endif

namespace {

inline Floats splat(float value) { return Floats{} + value; }

inline Floats load(const float* p) { return load_as<Floats>(p); }

inline void store(float* p, Floats v) { store_as(p, v); }

inline Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }

inline Floats magnitude(Floats v) { return (Floats)((Ints)v & 0x7fffffff); }

struct F32 {
  static constexpr bool SCALED = false;
  static constexpr int BYTES = 4;
  static Floats eight(const uint8_t* p) { return load_as<Floats>(p); }
  static float one(const uint8_t* p) { return as_float(load_u32(p)); }
  static void put(uint8_t* p, float value) { std::memcpy(p, &value, sizeof value); }
  static void put_eight(uint8_t* p, Floats v) { store_as(p, v); }
};

struct BF16 {
  static constexpr bool SCALED = false;
  static constexpr int BYTES = 2;
  static Floats eight(const uint8_t* p) { return (Floats)(widen_shorts(p) << 16); }
  static float one(const uint8_t* p) { return load_bf16(p); }
  static void put(uint8_t* p, float value) {
    const uint16_t bits = float_to_bf16(value);
    std::memcpy(p, &bits, sizeof bits);
  }
  static void put_eight(uint8_t* p, Floats v) {
    const Words bits = (Words)v, kept = bits >> 16;
    const Words rounded = (bits + 0x7fff + (kept & 1)) >> 16;
    narrow_shorts(p, choose((bits & 0x7fffffff) > 0x7f800000, kept | 0x40, rounded));
  }
};

struct F16 {
  static constexpr bool SCALED = false;
  static constexpr int BYTES = 2;
  static Floats eight(const uint8_t* p) { return widen_halves(p); }
  static float one(const uint8_t* p) { return load_half(p); }
  // A finite number beyond the range becomes the largest finite one.
  static void put(uint8_t* p, float value) {
    constexpr float MOST = 65504.0f;
    if (value > MOST && value < __builtin_inff()) value = MOST;
    if (value < -MOST && value > -__builtin_inff()) value = -MOST;
#ifdef __F16C__
    const uint16_t bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    const uint16_t bits = float_to_half(value);
#endif
    std::memcpy(p, &bits, sizeof bits);
  }
  static void put_eight(uint8_t* p, Floats v) {
    const Floats most = splat(65504.0f), size = magnitude(v);
    const auto beyond = (size > most) & (size < __builtin_inff());
    narrow_halves(p, choose(beyond, choose(v > 0.0f, most, -most), v));
  }
};

// e to the x for x from -87 to 88, with a relative error within 2e-7; NaN stays NaN. V is any vector of floats.
template <typename V, typename I>
inline V exponential_within(V x) {
  const V shifted = x * 1.44269504f + 12582912.0f;  // the nearest integer is in the low bits
  const V whole = shifted - 12582912.0f;
  const V r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  V p = V{} + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const V power = (V)(((I)shifted - 0x4b400000 + 127) << 23);
  return p * power;
}

// The same for any x: 0 and infinity far out.
template <typename V, typename I>
inline V exponential(V x) {
  const V given = x, least = V{} - 87.0f, most = V{} + 88.0f;
  x = choose(x < least, least, x);
  x = choose(x > most, most, x);
  const V result = exponential_within<V, I>(x);
  return choose(given == given, result, given);
}

inline Floats exponential(Floats x) { return exponential<Floats, Ints>(x); }

// The relative error is within 3e-7; NaN stays NaN. Near 0 it is a polynomial, because the quotient would lose digits
// there.
template <typename V, typename I>
inline V hyperbolic_tangent(V x) {
  const V size = (V)((I)x & 0x7fffffff), square = x * x;
  V p = V{} - 5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const V near = p * square * x + x;
  const V far = 1.0f - 2.0f / (1.0f + exponential<V, I>(size + size));
  const V signed_far = (V)((I)far | ((I)x & INT32_MIN));
  return choose(size < 0.625f, near, signed_far);
}

}  // namespace
