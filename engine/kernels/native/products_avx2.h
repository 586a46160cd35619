// Products with quantised rows for AVX2, with VNNI where the compiler was told so.
//
// ROWS rows are multiplied at once: they share the loads of the activation, and their sums hide each other's latency.
// While they are, what lies `ahead` bytes further is asked for.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

// An address that is never read need not be one of ours.
inline void ask_for(const uint8_t* p, ptrdiff_t ahead) {
  _mm_prefetch((const char*)(uintptr_t(p) + uintptr_t(ahead)), _MM_HINT_T0);
}

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// sums + the products of unsigned a and signed b, added up in fours. Without VNNI two products must fit 16 bits.
inline __m256i add_dot(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sums, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

// sums + the products of 16-bit a and b, added up in pairs
inline __m256i add_pairs(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sums, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

inline void add_fours(const int8_t* q, int32_t* out) {
  _mm256_storeu_si256((__m256i*)out, add_dot(_mm256_setzero_si256(), _mm256_set1_epi8(1), load_bytes(q)));
}

// 16 bytes to 32 digits: the low halves, then the high halves
inline __m256i nibbles(const uint8_t* p) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  const __m256i shifts = _mm256_set_epi64x(4, 4, 0, 0);
  return _mm256_and_si256(_mm256_srlv_epi64(twice, shifts), _mm256_set1_epi8(15));
}

inline __m256 one_half(const uint8_t* p) {
  return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p))));
}

inline __m256 add_scaled(__m256 sum, __m256i dot, __m256 scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum);
}

#if defined(__AVX512VNNI__)
#include "products_avx512.h"
#else
template <int ROWS>
struct Q4_1Rows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    __m256 sums[ROWS];
    __m128 lows[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm256_setzero_ps(), lows[r] = _mm_setzero_ps();
    for (int32_t b = 0; b < columns / 32; ++b) {
      const __m256i q = load_bytes(x.q + 32 * b);
      const __m128 pair = _mm_castpd_ps(_mm_load_sd((const double*)(x.pair + 2 * b)));
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q4_1_BYTES;
        ask_for(block, ahead);
        const __m128 both = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(int32_t(load_u32(block)))), pair);
        lows[r] = _mm_add_ps(lows[r], both);
        const __m256i dot = add_dot(_mm256_setzero_si256(), nibbles(block + 4), q);
        sums[r] = add_scaled(sums[r], dot, _mm256_broadcastss_ps(both));
      }
    }
    for (int r = 0; r < ROWS; ++r) out[r] = sum_of((Floats)sums[r]) + _mm_cvtss_f32(_mm_movehdup_ps(lows[r]));
  }
};

template <int ROWS>
struct Q4_0Rows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    __m256 sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm256_setzero_ps();
    for (int32_t b = 0; b < columns / 32; ++b) {
      const __m256i q = load_bytes(x.q + 32 * b);
      const __m256i eights = _mm256_slli_epi32(load_bytes(x.fours + 8 * b), 3);
      const __m256i begin = _mm256_sub_epi32(_mm256_setzero_si256(), eights);
      const __m256 scale = _mm256_set1_ps(x.pair[2 * b]);
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q4_0_BYTES;
        ask_for(block, ahead);
        const __m256i dot = add_dot(begin, nibbles(block + 2), q);
        sums[r] = add_scaled(sums[r], dot, _mm256_mul_ps(one_half(block), scale));
      }
    }
    for (int r = 0; r < ROWS; ++r) out[r] = sum_of((Floats)sums[r]);
  }
};

template <int ROWS>
struct Q8_0Rows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    __m256 sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm256_setzero_ps();
    for (int32_t b = 0; b < columns / 32; ++b) {
      const __m256i q = load_bytes(x.q + 32 * b);
      const __m256 scale = _mm256_set1_ps(x.pair[2 * b]);
#if defined(__AVXVNNI__)
      // The weights become unsigned by adding 128, which is taken off again through the sums of the activation.
      const __m256i sign = _mm256_set1_epi8(-128);
      const __m256i begin = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(load_bytes(x.fours + 8 * b), 7));
#endif
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q8_0_BYTES;
        ask_for(block, ahead);
        const __m256i w = load_bytes(block + 2);
#if defined(__AVXVNNI__)
        const __m256i dot = add_dot(begin, _mm256_xor_si256(w, sign), q);
#else
        const __m256i dot = add_dot(_mm256_setzero_si256(), _mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
#endif
        sums[r] = add_scaled(sums[r], dot, _mm256_mul_ps(one_half(block), scale));
      }
    }
    for (int r = 0; r < ROWS; ++r) out[r] = sum_of((Floats)sums[r]);
  }
};

#endif

// Scales and minima of a Q4_K or Q5_K block as 8 + 8 numbers of 16 bits.
inline __m256i k_scales(const uint8_t* packed) {
  const uint32_t first = load_u32(packed), second = load_u32(packed + 4), rest = load_u32(packed + 8);
  const uint32_t scales = (rest & 0x0f0f0f0f) | (first >> 6 & 0x03030303) << 4;
  const uint32_t minima = (rest >> 4 & 0x0f0f0f0f) | (second >> 6 & 0x03030303) << 4;
  return _mm256_cvtepu8_epi16(
      _mm_set_epi32(int32_t(minima), int32_t(second & 0x3f3f3f3f), int32_t(scales), int32_t(first & 0x3f3f3f3f)));
}

// Number j of the 8 in each half, 16 times
inline __m256i spread(__m256i eight, int j) {
  return _mm256_shuffle_epi8(eight, _mm256_set1_epi16(int16_t(0x0100 + 0x0202 * j)));
}

// Q4_K, and Q5_K where FIFTH.
template <bool FIFTH, int ROWS>
inline void k_rows(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                   float* out) {
  constexpr int BYTES = FIFTH ? Q5_K_BYTES : Q4_K_BYTES;
  const __m256i fifteen = _mm256_set1_epi8(15);
  __m256 sums[ROWS];
  __m128 lows[ROWS];
  for (int r = 0; r < ROWS; ++r) sums[r] = _mm256_setzero_ps(), lows[r] = _mm_setzero_ps();
  for (int32_t b = 0; b < columns / 256; ++b) {
    const int8_t* q = x.wide + 256 * b;
    const __m256i halves = load_bytes(x.sums + 16 * b);
    const __m128i wholes = _mm_hadd_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    const __m128 scale = _mm_set1_ps(x.wide_scale[b]);
    for (int r = 0; r < ROWS; ++r) {
      const uint8_t* block = rows + size_t(r) * row_bytes + b * BYTES;
      for (int i = 0; i < BYTES; i += 64) ask_for(block + i, ahead);
      const __m128 both = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(int32_t(load_u32(block)))), scale);
      const __m256i packed = k_scales(block + 4);
      const __m128i low = _mm_madd_epi16(_mm256_extracti128_si256(packed, 1), wholes);
      lows[r] = _mm_fmadd_ps(_mm_cvtepi32_ps(low), _mm_shuffle_ps(both, both, 0x55), lows[r]);
      const __m256i scales = _mm256_broadcastsi128_si256(_mm256_castsi256_si128(packed));
      __m256i high = _mm256_setzero_si256();
      if (FIFTH) high = load_bytes(block + 16);
      __m256i total = _mm256_setzero_si256();
      for (int j = 0; j < 4; ++j) {
        const __m256i bytes = load_bytes(block + (FIFTH ? 48 : 16) + 32 * j);
        __m256i first = _mm256_and_si256(bytes, fifteen);
        __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), fifteen);
        if (FIFTH) {
          const __m256i one = _mm256_set1_epi8(1), two = _mm256_set1_epi8(2);
          first = _mm256_or_si256(first, _mm256_slli_epi16(_mm256_and_si256(high, one), 4));
          second = _mm256_or_si256(second, _mm256_slli_epi16(_mm256_and_si256(high, two), 3));
          high = _mm256_srli_epi16(high, 2);
        }
        total = add_pairs(total, _mm256_maddubs_epi16(first, load_bytes(q + 64 * j)), spread(scales, 2 * j));
        total = add_pairs(total, _mm256_maddubs_epi16(second, load_bytes(q + 64 * j + 32)), spread(scales, 2 * j + 1));
      }
      sums[r] = add_scaled(sums[r], total, _mm256_broadcastss_ps(both));
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    out[r] = sum_of((Floats)sums[r]) - sum_of((Floats)_mm256_zextps128_ps256(lows[r]));
  }
}

template <int ROWS>
struct Q4_KRows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    k_rows<false, ROWS>(rows, row_bytes, columns, ahead, x, out);
  }
};

template <int ROWS>
struct Q5_KRows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    k_rows<true, ROWS>(rows, row_bytes, columns, ahead, x, out);
  }
};

template <int ROWS>
struct Q6_KRows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    const __m256i fifteen = _mm256_set1_epi8(15), three = _mm256_set1_epi8(3);
    __m256 sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm256_setzero_ps();
    for (int32_t b = 0; b < columns / 256; ++b) {
      const int8_t* q = x.wide + 256 * b;
      const __m256i sixteens = load_bytes(x.sums + 16 * b);
      const __m256 scale = _mm256_set1_ps(x.wide_scale[b]);
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q6_K_BYTES;
        for (int i = 0; i < Q6_K_BYTES; i += 64) ask_for(block + i, ahead);
        const __m128i scales = _mm_loadu_si128((const __m128i*)(block + 192));
        const __m256i extra = _mm256_madd_epi16(_mm256_cvtepi8_epi16(scales), sixteens);
        __m256i total = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(extra, 5));
        for (int h = 0; h < 2; ++h) {
          const __m256i first = load_bytes(block + 64 * h), second = load_bytes(block + 64 * h + 32);
          __m256i high = load_bytes(block + 128 + 32 * h);
          for (int k = 0; k < 4; ++k) {
            const __m256i bytes = k % 2 ? second : first;
            const __m256i low = _mm256_and_si256(k < 2 ? bytes : _mm256_srli_epi16(bytes, 4), fifteen);
            const __m256i digits = _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(high, three), 4));
            high = _mm256_srli_epi16(high, 2);
            // 16 numbers share a scale, that is a half of the vector
            const __m128i which = _mm_set_epi64x(0x0101010101010101LL * (8 * h + 2 * k + 1),
                                                 0x0101010101010101LL * (8 * h + 2 * k));
            const __m256i weights = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, which));
            const __m256i products = _mm256_maddubs_epi16(digits, load_bytes(q + 128 * h + 32 * k));
            total = add_pairs(total, products, weights);
          }
        }
        sums[r] = add_scaled(sums[r], total, _mm256_mul_ps(one_half(block + 208), scale));
      }
    }
    for (int r = 0; r < ROWS; ++r) out[r] = sum_of((Floats)sums[r]);
  }
};

template <template <int> class Kernel, int ROWS>
inline void each_row(const Rows& rows, const Activation& x, float* out) {
  const size_t bytes = rows.row_bytes;
  const uint8_t* end = rows.data + size_t(rows.count) * bytes;
  const size_t lead = AHEAD > ROWS * bytes ? AHEAD : ROWS * bytes;
  for (int32_t r = 0; r < rows.count;) {
    const uint8_t* row = rows.data + size_t(r) * bytes;
    const bool within = lead < size_t(end - row);
    const ptrdiff_t ahead = ptrdiff_t(lead + (within ? 0 : uintptr_t(rows.next) - uintptr_t(end)));
    if (r + ROWS <= rows.count) {
      Kernel<ROWS>::run(row, bytes, rows.columns, ahead, x, out + r);
      r += ROWS;
    } else {
      Kernel<1>::run(row, bytes, rows.columns, ahead, x, out + r);
      r += 1;
    }
  }
}

void multiply_q4_0(const Rows& rows, const Activation& x, float* out) { each_row<Q4_0Rows, 4>(rows, x, out); }

void multiply_q4_1(const Rows& rows, const Activation& x, float* out) { each_row<Q4_1Rows, 4>(rows, x, out); }

void multiply_q8_0(const Rows& rows, const Activation& x, float* out) { each_row<Q8_0Rows, 4>(rows, x, out); }

void multiply_q4_k(const Rows& rows, const Activation& x, float* out) { each_row<Q4_KRows, 2>(rows, x, out); }

void multiply_q5_k(const Rows& rows, const Activation& x, float* out) { each_row<Q5_KRows, 2>(rows, x, out); }

void multiply_q6_k(const Rows& rows, const Activation& x, float* out) { each_row<Q6_KRows, 2>(rows, x, out); }

}  // namespace
}  // namespace chatterm
