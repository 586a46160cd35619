// Eight floats at once in the compiler's vector types: the compiler finds the instructions for any instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Shorts __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(8)));

inline Floats splat(float value) { return Floats{} + value; }

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline Floats magnitude(Floats v) { return (Floats)((Ints)v & 0x7fffffff); }

// Adds in the order of `sum_four`.
inline float sum_of(Floats v) {
#ifdef __AVX2__
  const __m256 twos = _mm256_hadd_ps((__m256)v, (__m256)v), fours = _mm256_hadd_ps(twos, twos);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
#else
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#endif
}

inline float largest_of(Floats v) {
#ifdef __AVX2__
  __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
  float most = v[0];
  for (int i = 1; i < 8; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// The sums of four vectors, one after the other.
inline void sum_four(Floats a, Floats b, Floats c, Floats d, float* out) {
#ifdef __AVX2__
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  out[0] = sum_of(a), out[1] = sum_of(b), out[2] = sum_of(c), out[3] = sum_of(d);
#endif
}

struct F32 {
  static constexpr bool SCALED = false;
  static constexpr int BYTES = 4;
  static Floats eight(const uint8_t* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static float one(const uint8_t* p) { return as_float(load_u32(p)); }
  static void put(uint8_t* p, float value) { std::memcpy(p, &value, sizeof value); }
  static void put_eight(uint8_t* p, Floats v) { std::memcpy(p, &v, sizeof v); }
};

struct BF16 {
  static constexpr bool SCALED = false;
  static constexpr int BYTES = 2;
  static Floats eight(const uint8_t* p) {
#ifdef __AVX2__
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    Shorts v;
    std::memcpy(&v, p, sizeof v);
    return (Floats)(__builtin_convertvector(v, Ints) << 16);
#endif
  }
  static float one(const uint8_t* p) { return load_bf16(p); }
  static void put(uint8_t* p, float value) {
    const uint16_t bits = float_to_bf16(value);
    std::memcpy(p, &bits, sizeof bits);
  }
  static void put_eight(uint8_t* p, Floats v) {
    const Words bits = (Words)v, kept = bits >> 16;
    const Words rounded = (bits + 0x7fff + (kept & 1)) >> 16;
    const Shorts found = __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? kept | 0x40 : rounded, Shorts);
    std::memcpy(p, &found, sizeof found);
  }
};

struct F16 {
  static constexpr bool SCALED = false;
  static constexpr int BYTES = 2;
  static Floats eight(const uint8_t* p) {
#ifdef __F16C__
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    Floats v;
    for (int i = 0; i < 8; ++i) v[i] = load_half(p + 2 * i);
    return v;
#endif
  }
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
#ifdef __F16C__
    const Floats most = splat(65504.0f), size = magnitude(v);
    v = (size > most) & (size < __builtin_inff()) ? (v > 0.0f ? most : -most) : v;
    const __m128i bits = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &bits, sizeof bits);
#else
    for (int i = 0; i < 8; ++i) put(p + 2 * i, v[i]);
#endif
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
  x = x < least ? least : x;
  x = x > most ? most : x;
  const V result = exponential_within<V, I>(x);
  return given == given ? result : given;
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
  return size < 0.625f ? near : signed_far;
}

}  // namespace
