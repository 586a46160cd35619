// Eight floats as a vector of AVX2. Part of vectors.h.
#pragma once

#include <immintrin.h>

namespace {

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Shorts __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(8)));

template <typename Mask, typename V>
inline V choose(Mask where, V yes, V no) {
  return where ? yes : no;
}

template <typename V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
inline void store_as(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Adds in the order of `sum_four`.
inline float sum_of(Floats v) {
  const __m256 twos = _mm256_hadd_ps((__m256)v, (__m256)v), fours = _mm256_hadd_ps(twos, twos);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

inline float largest_of(Floats v) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// The sums of four vectors, one after the other.
inline void sum_four(Floats a, Floats b, Floats c, Floats d, float* out) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

inline Words widen_shorts(const uint8_t* p) { return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }

inline void narrow_shorts(uint8_t* p, Words v) { store_as(p, __builtin_convertvector(v, Shorts)); }

// Eight bytes as integers, signed or unsigned.
template <bool SIGNED>
inline Ints widen_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  return (Ints)(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

inline void narrow_bytes(int8_t* p, Ints v) { store_as(p, __builtin_convertvector(v, Bytes)); }

inline Floats widen_halves(const uint8_t* p) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

inline void narrow_halves(uint8_t* p, Floats v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
