// Quantised rows side by side for AVX2: lane r of a vector has the numbers of row r, read as stored in a file or
// interleaved. Part of products_avx2.h.
#pragma once

#include "interleave.h"

namespace chatterm {
namespace {

constexpr int LANES = 8;
typedef Floats LaneFloats;
typedef Ints LaneInts;
typedef uint32_t LaneBits __attribute__((vector_size(32)));  // four bytes of each row

// Splits words of two half floats, one word per row, into the lower and the upper ones.
inline void split_halves(__m128i first, __m128i second, LaneFloats& lower, LaneFloats& upper) {
  const __m128i mask = _mm_set1_epi32(0xffff);
  lower = (LaneFloats)_mm256_cvtph_ps(_mm_packus_epi32(_mm_and_si128(first, mask), _mm_and_si128(second, mask)));
  upper = (LaneFloats)_mm256_cvtph_ps(_mm_packus_epi32(_mm_srli_epi32(first, 16), _mm_srli_epi32(second, 16)));
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
  __m128i four(int from, int at) const {
    return _mm_loadu_si128((const __m128i*)(block + Order::word(at) + 4 * (first + from)));
  }
  void sixteen(int at, LaneBits* out) const {
    CT_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = (LaneBits)word(at + 4 * i);
  }
};

template <typename From>
inline void gather_32(const From& from, int at, LaneBits* out) {
  from.sixteen(at, out);
  from.sixteen(at + 16, out + 4);
}

inline LaneFloats to_floats(LaneInts v) { return __builtin_convertvector(v, LaneFloats); }

// a * b + c, rounded once
inline LaneFloats fused(LaneFloats a, LaneFloats b, LaneFloats c) {
  return (LaneFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

// Byte j of each number.
inline LaneFloats byte_of(LaneBits v, int j) { return to_floats((LaneInts)(v >> (8 * j) & 255u)); }

inline LaneBits low_nibbles(LaneBits v) { return v & 0x0f0f0f0fu; }
inline LaneBits high_nibbles(LaneBits v) { return v >> 4 & 0x0f0f0f0fu; }

// A block of all rows: the digits of columns 32 * part.., four per lane, and a scale and a low for each group of
// columns. DEPTH times two products fit into 16 bits.
template <int TYPE>
struct Lanes;

template <typename From>
inline void nibbles_of(const From& from, int at, LaneBits* out) {
  LaneBits packed[4];
  from.sixteen(at, packed);
  CT_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = low_nibbles(packed[i]), out[i + 4] = high_nibbles(packed[i]);
}

template <>
struct Lanes<CT_Q4_0> {
  static constexpr int PARTS = 1, BYTES = Q4_0_BYTES, GROUP = 32, DEPTH = 8;  // 8 * 2 * 15 * 127 < 2^15
  LaneFloats step;
  template <typename From>
  void open(const From& from) { step = from.halves(0); }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const { nibbles_of(from, 2, out); }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * -8.0f; }
};

template <>
struct Lanes<CT_Q4_1> {
  static constexpr int PARTS = 1, BYTES = Q4_1_BYTES, GROUP = 32, DEPTH = 8;
  LaneFloats step, least;
  template <typename From>
  void open(const From& from) {
    split_halves(from.four(0, 0), from.four(4, 0), step, least);
  }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const { nibbles_of(from, 4, out); }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return least; }
};

template <>
struct Lanes<CT_Q8_0> {
  static constexpr int PARTS = 1, BYTES = Q8_0_BYTES, GROUP = 32, DEPTH = 1;
  LaneFloats step;
  template <typename From>
  void open(const From& from) { step = from.halves(0); }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const {
    gather_32(from, 2, out);
    CT_UNROLL
    for (int i = 0; i < 8 && !SIGNED_BYTES; ++i) out[i] ^= 0x80808080u;
  }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * -128.0f; }
};

inline __m256i mxfp4_digits(__m256i nibbles) {
  const __m128i table = _mm_load_si128((const __m128i*)MXFP4_DIGITS);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
}

template <>
struct Lanes<CT_MXFP4> {
  static constexpr int PARTS = 1, BYTES = MXFP4_BYTES, GROUP = 32, DEPTH = 4;  // 4 * 2 * 24 * 127 < 2^15
  LaneFloats step;
  template <typename From>
  void open(const From& from) {
    const LaneInts e = from.bytes(0);
    step = (LaneFloats)(e < 2 ? 0x00200000 + (e & 1) * 0x00200000 : (e - 1) << 23);  // mxfp4_scale
  }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const {
    nibbles_of(from, 1, out);
    CT_UNROLL
    for (int i = 0; i < 8; ++i) out[i] = (LaneBits)mxfp4_digits((__m256i)out[i]);
  }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * float(-MXFP4_ZERO); }
};

// Q4_K, and Q5_K with FIFTH.
template <bool FIFTH>
struct LanesK {
  static constexpr int PARTS = 8, BYTES = FIFTH ? Q5_K_BYTES : Q4_K_BYTES, GROUP = 32, DEPTH = FIFTH ? 4 : 8;
  LaneFloats step, least;
  LaneBits scales[2], minima[2];  // four bytes each
  LaneBits fifth[8];              // the fifth binary digits of all parts
  LaneBits packed[8];             // two parts

  template <typename From>
  void open(const From& from) {
    LaneBits head[4];
    from.sixteen(0, head);
    const __m256i both = (__m256i)head[0];
    split_halves(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1), step, least);
    scales[0] = head[1] & 0x3f3f3f3fu;
    minima[0] = head[2] & 0x3f3f3f3fu;
    scales[1] = (head[3] & 0x0f0f0f0fu) | (head[1] >> 6 & 0x03030303u) << 4;
    minima[1] = (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 6 & 0x03030303u) << 4;
    if (FIFTH) gather_32(from, 16, fifth);
  }
  template <typename From>
  void digits(const From& from, int part, LaneBits* out) {
    if (part % 2 == 0) gather_32(from, (FIFTH ? 48 : 16) + 16 * part, packed);
    CT_UNROLL
    for (int i = 0; i < 8; ++i) {
      out[i] = part % 2 ? high_nibbles(packed[i]) : low_nibbles(packed[i]);
      if (FIFTH) out[i] |= (fifth[i] >> part & 0x01010101u) << 4;
    }
  }
  LaneFloats scale(int part) const { return byte_of(scales[part / 4], part % 4) * step; }
  LaneFloats low(int part) const { return byte_of(minima[part / 4], part % 4) * -least; }
};

template <>
struct Lanes<CT_Q4_K> : LanesK<false> {};
template <>
struct Lanes<CT_Q5_K> : LanesK<true> {};

template <>
struct Lanes<CT_Q6_K> {
  static constexpr int PARTS = 8, BYTES = Q6_K_BYTES, GROUP = 16, DEPTH = 2;  // 2 * 2 * 63 * 127 < 2^15
  LaneFloats step;
  LaneBits scales[4];             // four signed bytes each
  LaneBits lower[2][8], upper[8];  // of a half of the block

  template <typename From>
  void open(const From& from) {
    step = from.halves(208);
    from.sixteen(192, scales);
  }
  template <typename From>
  void digits(const From& from, int part, LaneBits* out) {
    const int half = part / 4, k = part % 4;
    if (k == 0) {
      gather_32(from, 64 * half, lower[0]);
      gather_32(from, 64 * half + 32, lower[1]);
      gather_32(from, 128 + 32 * half, upper);
    }
    CT_UNROLL
    for (int i = 0; i < 8; ++i) {
      const LaneBits low = k < 2 ? low_nibbles(lower[k % 2][i]) : high_nibbles(lower[k % 2][i]);
      out[i] = low | (upper[i] >> (2 * k) & 0x03030303u) << 4;
    }
  }
  LaneFloats scale(int group) const {
    return to_floats((LaneInts)(scales[group / 4] << (24 - group % 4 * 8)) >> 24) * step;
  }
  LaneFloats low(int group) const { return scale(group) * -32.0f; }
};

}  // namespace
}  // namespace chatterm
