// Products with quantised rows for AVX2, with VNNI where the compiler was told so.
//
// Eight rows are multiplied at once and lie in the lanes of a vector: lane r has the numbers of row r. So a row's sums
// have the order that those of panels have (panels.h), to the bit.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

// AVX2 multiplies signed bytes through their magnitudes; with VNNI digits are unsigned.
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
constexpr bool SIGNED_BYTES = false;
#else
constexpr bool SIGNED_BYTES = true;
#endif

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

inline void add_fours(const int8_t* q, int32_t* out) {
  _mm256_storeu_si256((__m256i*)out, add_dot(_mm256_setzero_si256(), _mm256_set1_epi8(1), load_bytes(q)));
}

// 16 bytes to 32 digits: the low halves, then the high halves
inline __m256i nibbles(const uint8_t* p) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  const __m256i shifts = _mm256_set_epi64x(4, 4, 0, 0);
  return _mm256_and_si256(_mm256_srlv_epi64(twice, shifts), _mm256_set1_epi8(15));
}

using EightRows = const uint8_t* const*;

// Bytes at..at + 16 of 8 rows: out[i] has bytes 4 * i.. of each.
inline void gather(EightRows rows, ptrdiff_t at, __m256i* out) {
  __m256i both[4];
  CT_UNROLL
  for (int r = 0; r < 4; ++r) {
    const __m128i first = _mm_loadu_si128((const __m128i*)(rows[r] + at));
    both[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128((const __m128i*)(rows[r + 4] + at)), 1);
  }
  const __m256i low = _mm256_unpacklo_epi32(both[0], both[1]), high = _mm256_unpackhi_epi32(both[0], both[1]);
  const __m256i low2 = _mm256_unpacklo_epi32(both[2], both[3]), high2 = _mm256_unpackhi_epi32(both[2], both[3]);
  out[0] = _mm256_unpacklo_epi64(low, low2);
  out[1] = _mm256_unpackhi_epi64(low, low2);
  out[2] = _mm256_unpacklo_epi64(high, high2);
  out[3] = _mm256_unpackhi_epi64(high, high2);
}

inline void gather_32(EightRows rows, ptrdiff_t at, __m256i* out) {
  gather(rows, at, out);
  gather(rows, at + 16, out + 4);
}

// Halves at `at` of 8 rows
inline __m256 gather_halves(EightRows rows, ptrdiff_t at) {
  __m128i halves = _mm_cvtsi32_si128(load_u16(rows[0] + at));
  halves = _mm_insert_epi16(halves, load_u16(rows[1] + at), 1);
  halves = _mm_insert_epi16(halves, load_u16(rows[2] + at), 2);
  halves = _mm_insert_epi16(halves, load_u16(rows[3] + at), 3);
  halves = _mm_insert_epi16(halves, load_u16(rows[4] + at), 4);
  halves = _mm_insert_epi16(halves, load_u16(rows[5] + at), 5);
  halves = _mm_insert_epi16(halves, load_u16(rows[6] + at), 6);
  halves = _mm_insert_epi16(halves, load_u16(rows[7] + at), 7);
  return _mm256_cvtph_ps(halves);
}

// The lower and the upper halves of 8 numbers
inline void split_halves(__m256i pairs, __m256& lower, __m256& upper) {
  const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)), high = _mm256_srli_epi32(pairs, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  lower = _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  upper = _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1));
}

// Byte j of 8 numbers
inline __m256 byte_of(__m256i numbers, int j) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(numbers, 8 * j), _mm256_set1_epi32(255)));
}

inline __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline __m256i high_nibbles(__m256i v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

// A block of 8 rows: `digits` of columns 32 * part.. by fours, and a scale and a low for each group of columns.
template <int TYPE>
struct Eight;

template <>
struct Eight<CT_Q4_0> {
  static constexpr int PARTS = 1, BYTES = Q4_0_BYTES, GROUP = 32, DEPTH = 8;  // 8 * 2 * 15 * 127 < 2^15
  __m256 step;
  void open(EightRows rows, ptrdiff_t at) { step = gather_halves(rows, at); }
  void digits(EightRows rows, ptrdiff_t at, int, __m256i* out) const {
    __m256i packed[4];
    gather(rows, at + 2, packed);
    CT_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = low_nibbles(packed[i]), out[i + 4] = high_nibbles(packed[i]);
  }
  __m256 scale(int) const { return step; }
  __m256 low(int) const { return _mm256_mul_ps(step, _mm256_set1_ps(-8.0f)); }
};

template <>
struct Eight<CT_Q4_1> {
  static constexpr int PARTS = 1, BYTES = Q4_1_BYTES, GROUP = 32, DEPTH = 8;
  __m256 step, least;
  void open(EightRows rows, ptrdiff_t at) {
    __m128i pairs[2];
    CT_UNROLL
    for (int h = 0; h < 2; ++h) {
      EightRows four = rows + 4 * h;
      __m128i v = _mm_cvtsi32_si128(int32_t(load_u32(four[0] + at)));
      v = _mm_insert_epi32(v, int32_t(load_u32(four[1] + at)), 1);
      v = _mm_insert_epi32(v, int32_t(load_u32(four[2] + at)), 2);
      pairs[h] = _mm_insert_epi32(v, int32_t(load_u32(four[3] + at)), 3);
    }
    split_halves(_mm256_set_m128i(pairs[1], pairs[0]), step, least);
  }
  void digits(EightRows rows, ptrdiff_t at, int, __m256i* out) const {
    __m256i packed[4];
    gather(rows, at + 4, packed);
    CT_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = low_nibbles(packed[i]), out[i + 4] = high_nibbles(packed[i]);
  }
  __m256 scale(int) const { return step; }
  __m256 low(int) const { return least; }
};

template <>
struct Eight<CT_Q8_0> {
  static constexpr int PARTS = 1, BYTES = Q8_0_BYTES, GROUP = 32, DEPTH = 1;
  __m256 step;
  void open(EightRows rows, ptrdiff_t at) { step = gather_halves(rows, at); }
  void digits(EightRows rows, ptrdiff_t at, int, __m256i* out) const {
    gather_32(rows, at + 2, out);
    CT_UNROLL
    for (int i = 0; i < 8 && !SIGNED_BYTES; ++i) out[i] = _mm256_xor_si256(out[i], _mm256_set1_epi8(-128));
  }
  __m256 scale(int) const { return step; }
  __m256 low(int) const { return _mm256_mul_ps(step, _mm256_set1_ps(-128.0f)); }
};

// Q4_K, and Q5_K where FIFTH.
template <bool FIFTH>
struct EightK {
  static constexpr int PARTS = 8, BYTES = FIFTH ? Q5_K_BYTES : Q4_K_BYTES, GROUP = 32, DEPTH = FIFTH ? 4 : 8;
  __m256 step, least;
  __m256i scales[2], minima[2];  // four bytes each
  __m256i fifth[8];              // the fifth digits of all parts
  __m256i later[8];              // the digits of the next part

  void open(EightRows rows, ptrdiff_t at) {
    __m256i head[4];
    gather(rows, at, head);
    split_halves(head[0], step, least);
    least = _mm256_xor_ps(least, _mm256_set1_ps(-0.0f));
    const __m256i six = _mm256_set1_epi32(0x3f3f3f3f), four = _mm256_set1_epi32(0x0f0f0f0f);
    const __m256i two = _mm256_set1_epi32(0x03030303);
    auto upper = [&](__m256i v) { return _mm256_slli_epi32(_mm256_and_si256(_mm256_srli_epi32(v, 6), two), 4); };
    scales[0] = _mm256_and_si256(head[1], six);
    minima[0] = _mm256_and_si256(head[2], six);
    scales[1] = _mm256_or_si256(_mm256_and_si256(head[3], four), upper(head[1]));
    minima[1] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(head[3], 4), four), upper(head[2]));
    if (FIFTH) gather_32(rows, at + 16, fifth);
  }
  void digits(EightRows rows, ptrdiff_t at, int part, __m256i* out) {
    __m256i packed[8];
    if (part % 2 == 0) gather_32(rows, at + (FIFTH ? 48 : 16) + 16 * part, packed);
    CT_UNROLL
    for (int i = 0; i < 8; ++i) {
      out[i] = part % 2 ? later[i] : low_nibbles(packed[i]);
      if (part % 2 == 0) later[i] = high_nibbles(packed[i]);
      if (FIFTH) {
        const __m256i one = _mm256_and_si256(_mm256_srli_epi16(fifth[i], part), _mm256_set1_epi8(1));
        out[i] = _mm256_or_si256(out[i], _mm256_slli_epi16(one, 4));
      }
    }
  }
  __m256 scale(int part) const { return _mm256_mul_ps(byte_of(scales[part / 4], part % 4), step); }
  __m256 low(int part) const { return _mm256_mul_ps(byte_of(minima[part / 4], part % 4), least); }
};

template <>
struct Eight<CT_Q4_K> : EightK<false> {};
template <>
struct Eight<CT_Q5_K> : EightK<true> {};

template <>
struct Eight<CT_Q6_K> {
  static constexpr int PARTS = 8, BYTES = Q6_K_BYTES, GROUP = 16, DEPTH = 2;  // 2 * 2 * 63 * 127 < 2^15
  __m256 step;
  __m256i scales[4];        // four signed bytes each
  __m256i lower[2][8], upper[8];  // of a half of the block

  void open(EightRows rows, ptrdiff_t at) {
    step = gather_halves(rows, at + 208);
    gather(rows, at + 192, scales);
  }
  void digits(EightRows rows, ptrdiff_t at, int part, __m256i* out) {
    const int half = part / 4, k = part % 4;
    if (k == 0) {
      gather_32(rows, at + 64 * half, lower[0]);
      gather_32(rows, at + 64 * half + 32, lower[1]);
      gather_32(rows, at + 128 + 32 * half, upper);
    }
    CT_UNROLL
    for (int i = 0; i < 8; ++i) {
      const __m256i low = k < 2 ? low_nibbles(lower[k % 2][i]) : high_nibbles(lower[k % 2][i]);
      const __m256i two = _mm256_and_si256(_mm256_srli_epi16(upper[i], 2 * k), _mm256_set1_epi8(3));
      out[i] = _mm256_or_si256(low, _mm256_slli_epi16(two, 4));
    }
  }
  __m256 scale(int group) const {
    const __m256i signed_byte = _mm256_srai_epi32(_mm256_slli_epi32(scales[group / 4], 24 - group % 4 * 8), 24);
    return _mm256_mul_ps(step, _mm256_cvtepi32_ps(signed_byte));
  }
  __m256 low(int group) const { return _mm256_mul_ps(scale(group), _mm256_set1_ps(-32.0f)); }
};

inline __m256i four_of(const int8_t* q) { return _mm256_set1_epi32(int32_t(load_u32(q))); }

// The products of COUNT * 4 digits of each row with as many numbers; without VNNI those of neighbours are added up in
// 16 bits as long as they fit.
template <int COUNT, int DEPTH, bool SIGNED>
inline __m256i dot_of(const __m256i* digits, const int8_t* q) {
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  CT_UNROLL
  for (int i = 0; i < COUNT; ++i) sums[i % 2] = add_dot(sums[i % 2], digits[i], four_of(q + 4 * i));
  return _mm256_add_epi32(sums[0], sums[1]);
#else
  __m256i sums = _mm256_setzero_si256();
  CT_UNROLL
  for (int i = 0; i < COUNT; i += DEPTH) {
    __m256i pairs = _mm256_setzero_si256();
    CT_UNROLL
    for (int j = i; j < i + DEPTH; ++j) {
      const __m256i x = four_of(q + 4 * j);
      pairs = _mm256_add_epi16(pairs, SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(digits[j]), _mm256_sign_epi8(x, digits[j]))
                                             : _mm256_maddubs_epi16(digits[j], x));
    }
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return sums;
#endif
}

// out[0..8] = 8 rows times the activation; what lies `ahead` bytes further is asked for meanwhile.
template <int TYPE>
inline void multiply_eight(EightRows rows, int32_t columns, ptrdiff_t ahead, const Activation& x, float* out) {
  using E = Eight<TYPE>;
  constexpr bool SIGNED = TYPE == CT_Q8_0 && SIGNED_BYTES;
  constexpr int EVERY = E::BYTES < 32 ? 2 : 1;  // blocks of a cache line
  constexpr int GROUPS = 32 / E::GROUP;
  const float* lows = E::GROUP == 32 ? x.low : x.low_16;
  __m256 sums = _mm256_setzero_ps();
  ptrdiff_t at = 0;
  for (int32_t b = 0; b < columns / 32 / E::PARTS; ++b, at += E::BYTES) {
    if (b % EVERY == 0) {
      CT_UNROLL
      for (int r = 0; r < 8; ++r) {
        for (int i = 0; i < E::BYTES; i += 64) {
          // An address that is never read need not be one of ours.
          _mm_prefetch((const char*)(uintptr_t(rows[r]) + uintptr_t(at + i + ahead)), _MM_HINT_T0);
        }
      }
    }
    E block;
    block.open(rows, at);
    CT_UNROLL
    for (int part = 0; part < E::PARTS; ++part) {
      const int32_t n = b * E::PARTS + part;
      const __m256 step = _mm256_set1_ps(x.scale[n]);
      __m256i digits[8];
      block.digits(rows, at, part, digits);
      CT_UNROLL
      for (int g = 0; g < GROUPS; ++g) {
        const int group = part * GROUPS + g;
        constexpr int COUNT = E::GROUP / 4;
        const __m256i dot = dot_of<COUNT, E::DEPTH, SIGNED>(digits + g * COUNT, x.q + 32 * n + E::GROUP * g);
        sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(block.scale(group), step), sums);
        if (!SIGNED) sums = _mm256_fmadd_ps(block.low(group), _mm256_set1_ps(lows[n * GROUPS + g]), sums);
      }
    }
  }
  _mm256_storeu_ps(out, sums);
}

template <int TYPE>
void multiply_rows(const Rows& rows, const Activation& x, float* out) {
  const size_t bytes = rows.row_bytes;
  const uint8_t* end = rows.data + size_t(rows.count) * bytes;
  const size_t lead = AHEAD > 8 * bytes ? AHEAD : 8 * bytes;
  for (int32_t first = 0; first < rows.count; first += 8) {
    const uint8_t* eight[8];
    for (int32_t r = 0; r < 8; ++r) {  // what there is less than 8 rows repeats the last one
      eight[r] = rows.data + size_t(first + r < rows.count ? first + r : rows.count - 1) * bytes;
    }
    const bool within = lead < size_t(end - eight[0]);
    const ptrdiff_t ahead = ptrdiff_t(lead + (within ? 0 : uintptr_t(rows.next) - uintptr_t(end)));
    if (first + 8 <= rows.count) {
      multiply_eight<TYPE>(eight, rows.columns, ahead, x, out + first);
    } else {
      float some[8];
      multiply_eight<TYPE>(eight, rows.columns, ahead, x, some);
      std::memcpy(out + first, some, size_t(rows.count - first) * sizeof(float));
    }
  }
}

void multiply_q4_0(const Rows& rows, const Activation& x, float* out) { multiply_rows<CT_Q4_0>(rows, x, out); }
void multiply_q4_1(const Rows& rows, const Activation& x, float* out) { multiply_rows<CT_Q4_1>(rows, x, out); }
void multiply_q8_0(const Rows& rows, const Activation& x, float* out) { multiply_rows<CT_Q8_0>(rows, x, out); }
void multiply_q4_k(const Rows& rows, const Activation& x, float* out) { multiply_rows<CT_Q4_K>(rows, x, out); }
void multiply_q5_k(const Rows& rows, const Activation& x, float* out) { multiply_rows<CT_Q5_K>(rows, x, out); }
void multiply_q6_k(const Rows& rows, const Activation& x, float* out) { multiply_rows<CT_Q6_K>(rows, x, out); }

}  // namespace
}  // namespace chatterm
