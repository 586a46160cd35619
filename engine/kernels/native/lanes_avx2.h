// Vectors of eight lanes for AVX2, with VNNI if the compiler targets it. Part of products_lanes.h.
//
// For one row of inputs, vectors of 16 lanes were no faster; products_avx512.h is for several.
#pragma once

#include <immintrin.h>

namespace chatterm {
namespace {

constexpr int LANES = 8;
typedef Floats LaneFloats;
typedef Ints LaneInts;
typedef uint32_t LaneBits __attribute__((vector_size(32)));  // four bytes of each row

// AVX2 multiplies signed bytes through their magnitudes; with VNNI, digits are unsigned.
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
constexpr bool SIGNED_BYTES = false;
#else
constexpr bool SIGNED_BYTES = true;
#endif

// Without it, GCC moves all additions behind all products, which then do not fit into the registers.
inline void keep(__m256i& sums) { asm("" : "+x"(sums)); }

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// sums + the products of unsigned a and signed b, added up in fours. Without VNNI, two products must fit into 16 bits.
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

// Splits words of two half floats, one word per row, into the lower and the upper ones.
inline void split_halves(__m128i first, __m128i second, LaneFloats& lower, LaneFloats& upper) {
  const __m128i mask = _mm_set1_epi32(0xffff);
  lower = (LaneFloats)_mm256_cvtph_ps(_mm_packus_epi32(_mm_and_si128(first, mask), _mm_and_si128(second, mask)));
  upper = (LaneFloats)_mm256_cvtph_ps(_mm_packus_epi32(_mm_srli_epi32(first, 16), _mm_srli_epi32(second, 16)));
}

inline void split_halves(LaneBits words, LaneFloats& lower, LaneFloats& upper) {
  const __m256i all = (__m256i)words;
  split_halves(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1), lower, upper);
}

// A block of LANES rows that are stored one after the other, as in a file. `at` is an offset in bytes into the block.
struct Apart {
  const uint8_t* const* rows;
  ptrdiff_t block;

  const uint8_t* of(int r, int at) const { return rows[r] + block + at; }

  // A half float of each row.
  LaneFloats halves(int at) const {
    __m128i v = _mm_cvtsi32_si128(load_u16(of(0, at)));
    v = _mm_insert_epi16(v, load_u16(of(1, at)), 1);
    v = _mm_insert_epi16(v, load_u16(of(2, at)), 2);
    v = _mm_insert_epi16(v, load_u16(of(3, at)), 3);
    v = _mm_insert_epi16(v, load_u16(of(4, at)), 4);
    v = _mm_insert_epi16(v, load_u16(of(5, at)), 5);
    v = _mm_insert_epi16(v, load_u16(of(6, at)), 6);
    v = _mm_insert_epi16(v, load_u16(of(7, at)), 7);
    return (LaneFloats)_mm256_cvtph_ps(v);
  }

  // A byte of each row.
  LaneInts bytes(int at) const {
    return LaneInts{*of(0, at), *of(1, at), *of(2, at), *of(3, at), *of(4, at), *of(5, at), *of(6, at), *of(7, at)};
  }

  // Two half floats of each row, at the beginning of the block.
  void two_halves(LaneFloats& lower, LaneFloats& upper) const {
    split_halves(four(0, 0), four(4, 0), lower, upper);
  }

  // Four bytes of each of four rows.
  __m128i four(int first, int at) const {
    __m128i v = _mm_cvtsi32_si128(int32_t(load_u32(of(first, at))));
    v = _mm_insert_epi32(v, int32_t(load_u32(of(first + 1, at))), 1);
    v = _mm_insert_epi32(v, int32_t(load_u32(of(first + 2, at))), 2);
    return _mm_insert_epi32(v, int32_t(load_u32(of(first + 3, at))), 3);
  }

  // 16 bytes of each row: out[i] has bytes 4 * i.. of each.
  void sixteen(int at, LaneBits* out) const {
    auto load = [&](int r) { return _mm_loadu_si128((const __m128i*)of(r, at)); };
    __m256i v[4];
    CT_UNROLL
    for (int r = 0; r < 4; ++r) v[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(r)), load(r + 4), 1);
    const __m256i low = _mm256_unpacklo_epi32(v[0], v[1]), high = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i low2 = _mm256_unpacklo_epi32(v[2], v[3]), high2 = _mm256_unpackhi_epi32(v[2], v[3]);
    out[0] = (LaneBits)_mm256_unpacklo_epi64(low, low2);
    out[1] = (LaneBits)_mm256_unpackhi_epi64(low, low2);
    out[2] = (LaneBits)_mm256_unpacklo_epi64(high, high2);
    out[3] = (LaneBits)_mm256_unpackhi_epi64(high, high2);
  }
};

// The same for interleaved rows (interleave.h).
template <int TYPE>
struct Interleaved {
  using Order = InterleavedBlock<TYPE>;
  const uint8_t* block;  // of the PANEL rows
  int first;             // index of the LANES rows among them

  __m256i word(int at) const { return load_bytes(block + Order::word(at) + 4 * first); }
  LaneFloats halves(int) const {
    return (LaneFloats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(block + 2 * first)));
  }
  LaneInts bytes(int) const {
    return (LaneInts)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(block + first)));
  }
  void two_halves(LaneFloats& lower, LaneFloats& upper) const {
    const auto* words = (const __m128i*)(block + 4 * first);
    split_halves(_mm_loadu_si128(words), _mm_loadu_si128(words + 1), lower, upper);
  }
  void sixteen(int at, LaneBits* out) const {
    CT_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = (LaneBits)word(at + 4 * i);
  }
};

// The same number in all lanes.
inline LaneFloats spread(float x) { return LaneFloats{} + x; }

// a * b + c, rounded once
inline LaneFloats fused(LaneFloats a, LaneFloats b, LaneFloats c) {
  return (LaneFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

inline LaneBits low_nibbles(LaneBits v) { return v & 0x0f0f0f0fu; }
inline LaneBits high_nibbles(LaneBits v) { return v >> 4 & 0x0f0f0f0fu; }

// Digits with further binary digits above their lower four.
inline LaneBits with_upper(LaneBits low, LaneBits upper) { return low | upper << 4; }

inline __m256i mxfp4_digits(__m256i nibbles) {
  const __m128i table = _mm_load_si128((const __m128i*)MXFP4_DIGITS);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
}

inline LaneBits mxfp4_digits(LaneBits nibbles) { return (LaneBits)mxfp4_digits((__m256i)nibbles); }

// dots[r] = the products of COUNT * 4 digits of each row with as many numbers of row r of N rows of inputs. Without VNNI,
// neighbouring products are summed in 16 bits as long as they fit, and the digits stay in a register while they are
// multiplied with all inputs.
template <int COUNT, int DEPTH, bool SIGNED, int N>
inline void dots_of(const LaneBits* digits, const uint32_t* q, LaneInts* dots) {
  auto x = [&](int j, int r) { return _mm256_set1_epi32(int32_t(q[j * wide_of(N) + r])); };
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
  CT_UNROLL
  for (int r = 0; r < N; ++r) {
    __m256i sums[2] = {};
    CT_UNROLL
    for (int j = 0; j < COUNT; ++j) sums[j % 2] = add_dot(sums[j % 2], (__m256i)digits[j], x(j, r));
    dots[r] = (LaneInts)_mm256_add_epi32(sums[0], sums[1]);
  }
#else
  if (SIGNED) {
    CT_UNROLL
    for (int r = 0; r < N; ++r) {
      __m256i sums = _mm256_setzero_si256();
      CT_UNROLL
      for (int j = 0; j < COUNT; ++j) {
        const __m256i w = (__m256i)digits[j];
        sums = add_dot(sums, _mm256_abs_epi8(w), _mm256_sign_epi8(x(j, r), w));
      }
      dots[r] = (LaneInts)sums;
    }
    return;
  }
  CT_UNROLL
  for (int i = 0; i < COUNT; i += DEPTH) {
    __m256i pairs[N];
    CT_UNROLL
    for (int j = i; j < i + DEPTH; ++j) {
      CT_UNROLL
      for (int r = 0; r < N; ++r) {
        const __m256i products = _mm256_maddubs_epi16((__m256i)digits[j], x(j, r));
        pairs[r] = j > i ? _mm256_add_epi16(pairs[r], products) : products;
        keep(pairs[r]);
      }
    }
    CT_UNROLL
    for (int r = 0; r < N; ++r) {
      const __m256i fours = _mm256_madd_epi16(pairs[r], _mm256_set1_epi16(1));
      dots[r] = (LaneInts)(i ? _mm256_add_epi32((__m256i)dots[r], fours) : fours);
    }
  }
#endif
}

// Stores 32 digits of each row among the digits of a panel, from row `side` on.
inline void place_digits(const LaneBits* digits, uint32_t* out, int32_t side) {
  CT_UNROLL
  for (int i = 0; i < 8; ++i) store_as(out + i * PANEL + side, digits[i]);
}

// How many times LANES interleaved rows are multiplied at once, so that their sums with N rows of inputs fit into the
// registers.
template <int TYPE, int N>
constexpr int sides_of() {
#ifdef __AVX512VL__
  return N <= (TYPE == CT_MXFP4 ? 4 : 8) ? 2 : 1;
#else
  return N <= 2 ? 2 : 1;
#endif
}

// The same for rows as stored.
template <int, int>
constexpr int sides_apart() {
  return 1;
}

}  // namespace
}  // namespace chatterm
