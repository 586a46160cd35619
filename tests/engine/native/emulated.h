// The instructions of AVX-512 and VNNI that the kernels use, in AVX2. Included before everything else.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

template <typename To, typename From>
inline To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename To>
inline To load(const void* from) {
  To to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

inline void store(void* to, Floats from) { std::memcpy(to, &from, sizeof from); }

template <typename To, typename Number>
inline To all(Number x) {
  To to;
  for (int i = 0; i < 16; ++i) to[i] = x;
  return to;
}

inline Floats floats(Ints x) {
  Floats to;
  for (int i = 0; i < 16; ++i) to[i] = float(x[i]);
  return to;
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fmaf(a[i], b[i], c[i]);
  return c;
}

struct Halves {
  __m256 of[2];
};

inline Floats joined(__m256 first, __m256 second) { return same_bits<Floats>(Halves{{first, second}}); }

// The numbers of each four of a that two bits of `which` say, then those of b.
inline Floats shuffle(Floats a, Floats b, int which) {
  Floats to;
  for (int i = 0; i < 16; ++i) to[i] = (i % 4 < 2 ? a : b)[i / 4 * 4 + (which >> (2 * (i % 4)) & 3)];
  return to;
}

// Two of the fours of a, then two of b.
inline Floats shuffle_fours(Floats a, Floats b, int which) {
  Floats to;
  for (int i = 0; i < 16; ++i) to[i] = (i < 8 ? a : b)[4 * (which >> (2 * (i / 4)) & 3) + i % 4];
  return to;
}

// sums + unsigned a * signed b, added up in fours. Even and odd bytes apart: maddubs would saturate.
inline __m256i dot(__m256i sums, __m256i a, __m256i b) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}

inline Ints dot(Ints sums, Ints a, Ints b) {
  struct Both {
    __m256i of[2];
  };
  Both found = same_bits<Both>(sums);
  const Both x = same_bits<Both>(a), y = same_bits<Both>(b);
  for (int i = 0; i < 2; ++i) found.of[i] = dot(found.of[i], x.of[i], y.of[i]);
  return same_bits<Ints>(found);
}

struct Quarters {
  __m128i of[4];
};

// Applies an instruction of SSE to each quarter.
template <typename Part>
inline Ints by_quarters(Ints a, Ints b, Part part) {
  Quarters found;
  const Quarters x = same_bits<Quarters>(a), y = same_bits<Quarters>(b);
  for (int i = 0; i < 4; ++i) found.of[i] = part(x.of[i], y.of[i]);
  return same_bits<Ints>(found);
}

inline Ints with_quarter(Ints a, __m128i b, int which) {
  Quarters found = same_bits<Quarters>(a);
  found.of[which] = b;
  return same_bits<Ints>(found);
}

#define EMULATED_BY_QUARTERS(name)                                                    \
  inline Ints name(Ints a, Ints b) {                                                  \
    return by_quarters(a, b, [](__m128i x, __m128i y) { return _mm_##name(x, y); }); \
  }
EMULATED_BY_QUARTERS(shuffle_epi8)
EMULATED_BY_QUARTERS(unpackhi_epi32)
EMULATED_BY_QUARTERS(unpackhi_epi64)
EMULATED_BY_QUARTERS(unpacklo_epi32)
EMULATED_BY_QUARTERS(unpacklo_epi64)

}  // namespace emulated

#undef _mm256_dpbusd_epi32
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_epi32 emulated::dot
#define _mm256_dpbusd_avx_epi32 emulated::dot
#ifdef EMULATES_AVX512
#undef _mm512_extractf32x8_ps
#undef _mm512_insertf32x8
#undef _mm512_inserti32x4
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps
#define CT_HOLD(v)
#define __m512 emulated::Floats
#define __m512i emulated::Ints
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_broadcast_f32x8(a) emulated::joined(a, a)
#define _mm512_broadcast_i32x4(a) emulated::same_bits<emulated::Ints>(emulated::Quarters{{a, a, a, a}})
#define _mm512_castps256_ps512(a) emulated::joined(a, a)
#define _mm512_castps512_ps256(a) (emulated::same_bits<emulated::Halves>(a).of[0])
#define _mm512_castsi128_si512(a) emulated::with_quarter(emulated::Ints{}, a, 0)
#define _mm512_cvtepi32_ps emulated::floats
#define _mm512_dpbusd_epi32 emulated::dot
#define _mm512_extractf32x8_ps(a, half) (emulated::same_bits<emulated::Halves>(a).of[half])
#define _mm512_fmadd_ps emulated::multiply_add
#define _mm512_insertf32x8(a, b, half) emulated::joined(emulated::same_bits<emulated::Halves>(a).of[1 - half], b)
#define _mm512_inserti32x4 emulated::with_quarter
#define _mm512_loadu_ps emulated::load<emulated::Floats>
#define _mm512_loadu_si512 emulated::load<emulated::Ints>
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_set1_epi32 emulated::all<emulated::Ints>
#define _mm512_set1_ps emulated::all<emulated::Floats>
#define _mm512_setzero_ps() (emulated::Floats{})
#define _mm512_setzero_si512() (emulated::Ints{})
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_shuffle_f32x4 emulated::shuffle_fours
#define _mm512_shuffle_ps emulated::shuffle
#define _mm512_storeu_ps emulated::store
#define _mm512_unpackhi_epi32 emulated::unpackhi_epi32
#define _mm512_unpackhi_epi64 emulated::unpackhi_epi64
#define _mm512_unpacklo_epi32 emulated::unpacklo_epi32
#define _mm512_unpacklo_epi64 emulated::unpacklo_epi64
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1
#else
#define __AVXVNNI__ 1
#endif
