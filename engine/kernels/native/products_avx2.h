// Products with quantised rows for AVX2, with VNNI where the compiler was told so.
//
// Eight rows are multiplied at once: lane r of a vector has the numbers of row r, and what was unpacked is multiplied
// with up to TILE rows of inputs. So sums have the order that those of panels have (panels.h), to the bit. Vectors of 16
// lanes were no faster.
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

constexpr int LANES = 8;
constexpr size_t LANES_AHEAD = 4096;  // the AHEAD of these products
typedef Floats LaneFloats;
typedef Ints LaneInts;
typedef uint32_t LaneBits __attribute__((vector_size(32)));  // four bytes of each row
using LaneRows = const uint8_t* const*;

// Halves at `at` of all rows
inline LaneFloats gather_halves(LaneRows rows, ptrdiff_t at) {
  __m128i v = _mm_cvtsi32_si128(load_u16(rows[0] + at));
  v = _mm_insert_epi16(v, load_u16(rows[1] + at), 1);
  v = _mm_insert_epi16(v, load_u16(rows[2] + at), 2);
  v = _mm_insert_epi16(v, load_u16(rows[3] + at), 3);
  v = _mm_insert_epi16(v, load_u16(rows[4] + at), 4);
  v = _mm_insert_epi16(v, load_u16(rows[5] + at), 5);
  v = _mm_insert_epi16(v, load_u16(rows[6] + at), 6);
  v = _mm_insert_epi16(v, load_u16(rows[7] + at), 7);
  return (LaneFloats)_mm256_cvtph_ps(v);
}

// Four bytes of four rows
inline __m128i gather_four(LaneRows rows, ptrdiff_t at) {
  __m128i v = _mm_cvtsi32_si128(int32_t(load_u32(rows[0] + at)));
  v = _mm_insert_epi32(v, int32_t(load_u32(rows[1] + at)), 1);
  v = _mm_insert_epi32(v, int32_t(load_u32(rows[2] + at)), 2);
  return _mm_insert_epi32(v, int32_t(load_u32(rows[3] + at)), 3);
}

// Two halves side by side of all rows: the lower and the upper ones
inline void split_halves(__m128i first, __m128i second, LaneFloats& lower, LaneFloats& upper) {
  const __m128i mask = _mm_set1_epi32(0xffff);
  lower = (LaneFloats)_mm256_cvtph_ps(_mm_packus_epi32(_mm_and_si128(first, mask), _mm_and_si128(second, mask)));
  upper = (LaneFloats)_mm256_cvtph_ps(_mm_packus_epi32(_mm_srli_epi32(first, 16), _mm_srli_epi32(second, 16)));
}

// Bytes at..at + 16 of all rows: out[i] has bytes 4 * i.. of each.
inline void gather(LaneRows rows, ptrdiff_t at, LaneBits* out) {
  auto sixteen = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows[r] + at)); };
  __m256i v[4];
  CT_UNROLL
  for (int r = 0; r < 4; ++r) v[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(r)), sixteen(r + 4), 1);
  const __m256i low = _mm256_unpacklo_epi32(v[0], v[1]), high = _mm256_unpackhi_epi32(v[0], v[1]);
  const __m256i low2 = _mm256_unpacklo_epi32(v[2], v[3]), high2 = _mm256_unpackhi_epi32(v[2], v[3]);
  out[0] = (LaneBits)_mm256_unpacklo_epi64(low, low2);
  out[1] = (LaneBits)_mm256_unpackhi_epi64(low, low2);
  out[2] = (LaneBits)_mm256_unpacklo_epi64(high, high2);
  out[3] = (LaneBits)_mm256_unpackhi_epi64(high, high2);
}

inline void gather_32(LaneRows rows, ptrdiff_t at, LaneBits* out) {
  gather(rows, at, out);
  gather(rows, at + 16, out + 4);
}

inline LaneFloats to_floats(LaneInts v) { return __builtin_convertvector(v, LaneFloats); }

// a * b + c, rounded once
inline LaneFloats fused(LaneFloats a, LaneFloats b, LaneFloats c) {
  return (LaneFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

// Byte j of each number
inline LaneFloats byte_of(LaneBits v, int j) { return to_floats((LaneInts)(v >> (8 * j) & 255u)); }

inline LaneBits low_nibbles(LaneBits v) { return v & 0x0f0f0f0fu; }
inline LaneBits high_nibbles(LaneBits v) { return v >> 4 & 0x0f0f0f0fu; }

// A block of all rows: the digits of columns 32 * part.., four in a lane, and a scale and a low for each group of
// columns. DEPTH times two products fit 16 bits.
template <int TYPE>
struct Lanes;

inline void nibbles_of(LaneRows rows, ptrdiff_t at, LaneBits* out) {
  LaneBits packed[4];
  gather(rows, at, packed);
  CT_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = low_nibbles(packed[i]), out[i + 4] = high_nibbles(packed[i]);
}

template <>
struct Lanes<CT_Q4_0> {
  static constexpr int PARTS = 1, BYTES = Q4_0_BYTES, GROUP = 32, DEPTH = 8;  // 8 * 2 * 15 * 127 < 2^15
  LaneFloats step;
  void open(LaneRows rows, ptrdiff_t at) { step = gather_halves(rows, at); }
  void digits(LaneRows rows, ptrdiff_t at, int, LaneBits* out) const { nibbles_of(rows, at + 2, out); }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * -8.0f; }
};

template <>
struct Lanes<CT_Q4_1> {
  static constexpr int PARTS = 1, BYTES = Q4_1_BYTES, GROUP = 32, DEPTH = 8;
  LaneFloats step, least;
  void open(LaneRows rows, ptrdiff_t at) {
    split_halves(gather_four(rows, at), gather_four(rows + 4, at), step, least);
  }
  void digits(LaneRows rows, ptrdiff_t at, int, LaneBits* out) const { nibbles_of(rows, at + 4, out); }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return least; }
};

template <>
struct Lanes<CT_Q8_0> {
  static constexpr int PARTS = 1, BYTES = Q8_0_BYTES, GROUP = 32, DEPTH = 1;
  LaneFloats step;
  void open(LaneRows rows, ptrdiff_t at) { step = gather_halves(rows, at); }
  void digits(LaneRows rows, ptrdiff_t at, int, LaneBits* out) const {
    gather_32(rows, at + 2, out);
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
  void open(LaneRows rows, ptrdiff_t at) {
    const LaneInts e{rows[0][at], rows[1][at], rows[2][at], rows[3][at],
                     rows[4][at], rows[5][at], rows[6][at], rows[7][at]};
    step = (LaneFloats)(e < 2 ? 0x00200000 + (e & 1) * 0x00200000 : (e - 1) << 23);  // mxfp4_scale
  }
  void digits(LaneRows rows, ptrdiff_t at, int, LaneBits* out) const {
    nibbles_of(rows, at + 1, out);
    CT_UNROLL
    for (int i = 0; i < 8; ++i) out[i] = (LaneBits)mxfp4_digits((__m256i)out[i]);
  }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * float(-MXFP4_ZERO); }
};

// Q4_K, and Q5_K where FIFTH.
template <bool FIFTH>
struct LanesK {
  static constexpr int PARTS = 8, BYTES = FIFTH ? Q5_K_BYTES : Q4_K_BYTES, GROUP = 32, DEPTH = FIFTH ? 4 : 8;
  LaneFloats step, least;
  LaneBits scales[2], minima[2];  // four bytes each
  LaneBits fifth[8];              // the fifth binary digits of all parts
  LaneBits packed[8];             // two parts

  void open(LaneRows rows, ptrdiff_t at) {
    LaneBits head[4];
    gather(rows, at, head);
    const __m256i both = (__m256i)head[0];
    split_halves(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1), step, least);
    scales[0] = head[1] & 0x3f3f3f3fu;
    minima[0] = head[2] & 0x3f3f3f3fu;
    scales[1] = (head[3] & 0x0f0f0f0fu) | (head[1] >> 6 & 0x03030303u) << 4;
    minima[1] = (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 6 & 0x03030303u) << 4;
    if (FIFTH) gather_32(rows, at + 16, fifth);
  }
  void digits(LaneRows rows, ptrdiff_t at, int part, LaneBits* out) {
    if (part % 2 == 0) gather_32(rows, at + (FIFTH ? 48 : 16) + 16 * part, packed);
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

  void open(LaneRows rows, ptrdiff_t at) {
    step = gather_halves(rows, at + 208);
    gather(rows, at + 192, scales);
  }
  void digits(LaneRows rows, ptrdiff_t at, int part, LaneBits* out) {
    const int half = part / 4, k = part % 4;
    if (k == 0) {
      gather_32(rows, at + 64 * half, lower[0]);
      gather_32(rows, at + 64 * half + 32, lower[1]);
      gather_32(rows, at + 128 + 32 * half, upper);
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

// The products of COUNT * 4 digits of each row with as many numbers of one of N rows of inputs; without VNNI those of
// neighbours are added up in 16 bits as long as they fit.
template <int COUNT, int DEPTH, bool SIGNED, int N>
inline LaneInts dot_of(const LaneBits* digits, const uint32_t* q) {
  __m256i sums[2] = {};
  CT_UNROLL
  for (int i = 0; i < COUNT; i += DEPTH) {
    auto x = [&](int j) { return _mm256_set1_epi32(int32_t(q[j * N])); };
#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
    CT_UNROLL
    for (int j = i; j < i + DEPTH; ++j) sums[j % 2] = add_dot(sums[j % 2], (__m256i)digits[j], x(j));
#else
    __m256i pairs = _mm256_setzero_si256();
    CT_UNROLL
    for (int j = i; j < i + DEPTH; ++j) {
      const __m256i w = (__m256i)digits[j];
      pairs = _mm256_add_epi16(pairs, SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x(j), w))
                                             : _mm256_maddubs_epi16(w, x(j)));
    }
    sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
  return (LaneInts)_mm256_add_epi32(sums[0], sums[1]);
}

// Memory that is asked for ahead of its use, in its order, and from `end` on what the thread multiplies after that.
// An address that is never read need not be one of ours.
struct Fetch {
  uintptr_t at, end, next;

  template <int SIZE>
  void go_on() {
    CT_UNROLL
    for (int i = 0; i < SIZE; i += 64) _mm_prefetch((const char*)(at + i), _MM_HINT_T0);
    at += SIZE;
    if (at >= end) at += next - end, end = UINTPTR_MAX;
  }
};

// sums[r] = the products of LANES rows with row r of N rows of inputs.
template <int TYPE, int N>
inline void multiply_lanes(LaneRows rows, int32_t columns, Fetch& fetch, const Inputs& x, LaneFloats* sums) {
  using L = Lanes<TYPE>;
  constexpr bool SIGNED = TYPE == CT_Q8_0 && SIGNED_BYTES;
  constexpr int GROUPS = 32 / L::GROUP, COUNT = L::GROUP / 4;
  // One row of inputs leaves no time to find out which part it is; more of them would be very long code.
  constexpr int UNROLLED = N == 1 || L::PARTS == 1 ? L::PARTS : 2;
  const float* lows = L::GROUP == 32 ? x.low : x.low_16;
  CT_UNROLL
  for (int r = 0; r < N; ++r) sums[r] = LaneFloats{};
  ptrdiff_t at = 0;
  for (int32_t b = 0; b < columns / 32 / L::PARTS; ++b, at += L::BYTES) {
    L block;
    block.open(rows, at);
#pragma GCC unroll 1
    for (int begin = 0; begin < L::PARTS; begin += UNROLLED) {
      CT_UNROLL
      for (int p = 0; p < UNROLLED; ++p) {
        const int part = begin + p;
        fetch.go_on<LANES * L::BYTES / L::PARTS>();
        const int32_t n = b * L::PARTS + part;
        LaneBits digits[8];
        block.digits(rows, at, part, digits);
        CT_UNROLL
        for (int g = 0; g < GROUPS; ++g) {
          const int group = part * GROUPS + g;
          const LaneFloats scale = block.scale(group), low = block.low(group);
          CT_UNROLL
          for (int r = 0; r < N; ++r) {
            const uint32_t* q = x.q + (8 * n + g * COUNT) * N + r;
            const LaneInts dot = dot_of<COUNT, L::DEPTH, SIGNED, N>(digits + g * COUNT, q);
            sums[r] = fused(to_floats(dot), scale * x.scale[n * N + r], sums[r]);
            if (!SIGNED) sums[r] = fused(low, LaneFloats{} + lows[(n * GROUPS + g) * N + r], sums[r]);
          }
        }
      }
    }
  }
}

template <int TYPE, int N>
void multiply_some(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  const size_t bytes = rows.row_bytes;
  const uintptr_t begin = uintptr_t(rows.data), group = LANES * bytes;
  // The next rows are there before they are read, and not long before: 16 KB ahead was 15% slower.
  Fetch fetch{begin + (LANES_AHEAD > group * 5 / 4 ? LANES_AHEAD : group * 5 / 4), begin + size_t(rows.count) * bytes,
              uintptr_t(rows.next)};
  if (fetch.at >= fetch.end) fetch.at += fetch.next - fetch.end, fetch.end = UINTPTR_MAX;
  for (int32_t first = 0; first < rows.count; first += LANES) {
    const uint8_t* some[LANES];
    for (int32_t r = 0; r < LANES; ++r) {  // what lacks of so many rows repeats the last one
      some[r] = rows.data + size_t(first + r < rows.count ? first + r : rows.count - 1) * bytes;
    }
    LaneFloats sums[N];
    multiply_lanes<TYPE, N>(some, rows.columns, fetch, x, sums);
    if (first + LANES <= rows.count) {
      for (int32_t r = 0; r < x.rows; ++r) std::memcpy(out + r * stride + first, &sums[r], sizeof(LaneFloats));
    } else {
      const size_t found = size_t(rows.count - first) * sizeof(float);
      for (int32_t r = 0; r < x.rows; ++r) std::memcpy(out + r * stride + first, &sums[r], found);
    }
  }
}

template <int TYPE>
void multiply_rows(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  by_width(x.wide, [&](auto wide) { multiply_some<TYPE, wide.value>(rows, x, out, stride); });
}

}  // namespace
}  // namespace chatterm
