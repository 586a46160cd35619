// Products with quantised rows for AVX2, with VNNI if the compiler targets it.
//
// Eight rows are multiplied at once: lane r of a vector has the numbers of row r, and unpacked numbers are multiplied
// with up to TILE rows of inputs. So sums have the same order as those of panels (panels.h), to the bit. For one row,
// vectors of 16 lanes were no faster; products_avx512.h is for several.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

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

// Expands 16 bytes to 32 digits: the low halves, then the high halves.
inline __m256i nibbles(const uint8_t* p) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  const __m256i shifts = _mm256_set_epi64x(4, 4, 0, 0);
  return _mm256_and_si256(_mm256_srlv_epi64(twice, shifts), _mm256_set1_epi8(15));
}

}  // namespace
}  // namespace chatterm

#include "lanes_avx2.h"

namespace chatterm {
namespace {

constexpr size_t LANES_AHEAD = 4096;  // replaces AHEAD in these products

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

// Calls part with a number of rows of inputs as a constant.
template <typename Part>
inline void by_rows(int32_t rows, const Part& part) {
  switch (rows) {
    case 3:
      return part(Constant<3>{});
    case 5:
      return part(Constant<5>{});
    case 6:
      return part(Constant<6>{});
    case 7:
      return part(Constant<7>{});
    default:
      return by_width(rows, part);
  }
}

// Prefetches memory in order, and from `end` on what the thread multiplies next. An address that is never read need not
// be valid.
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

// The sums of LANES rows with N rows of inputs, block by block: add() is called for every part of each block.
template <int TYPE, int N>
struct LaneSums {
  using L = Lanes<TYPE>;
  static constexpr bool SIGNED = TYPE == CT_Q8_0 && SIGNED_BYTES;
  static constexpr int GROUPS = 32 / L::GROUP, COUNT = L::GROUP / 4, WIDE = wide_of(N);
  L block;
  LaneFloats sums[N];

  // Adds 32 columns, which are number n of the row and `part` of the block.
  template <typename From>
  void add(const From& from, int part, int32_t n, const Inputs& x) {
    const float* lows = L::GROUP == 32 ? x.low : x.low_16;
    LaneBits digits[8];
    block.digits(from, part, digits);
    CT_UNROLL
    for (int g = 0; g < GROUPS; ++g) {
      const int group = part * GROUPS + g;
      const LaneFloats scale = block.scale(group), low = block.low(group);
      LaneInts dots[N];
      dots_of<COUNT, L::DEPTH, SIGNED, N>(digits + g * COUNT, x.q + (8 * n + g * COUNT) * WIDE, dots);
      CT_UNROLL
      for (int r = 0; r < N; ++r) {
        sums[r] = fused(to_floats(dots[r]), scale * x.scale[n * WIDE + r], sums[r]);
        if (!SIGNED) sums[r] = fused(low, LaneFloats{} + lows[(n * GROUPS + g) * WIDE + r], sums[r]);
      }
    }
  }
};

// Multiplies SIDES times LANES rows with N rows of inputs; from(b, side) gives block b of a side.
template <int TYPE, int N, int SIDES, typename From>
inline void multiply_lanes(From from, int32_t columns, Fetch& fetch, const Inputs& x, LaneSums<TYPE, N>* sides) {
  using L = Lanes<TYPE>;
  // A single row of inputs leaves no time to look up which part it is; for more rows the unrolled code would be very
  // long.
  constexpr int UNROLLED = N == 1 || L::PARTS == 1 ? L::PARTS : 2;
  CT_UNROLL
  for (int s = 0; s < SIDES; ++s) {
    CT_UNROLL
    for (int r = 0; r < N; ++r) sides[s].sums[r] = LaneFloats{};
  }
  for (int32_t b = 0; b < columns / 32 / L::PARTS; ++b) {
    CT_UNROLL
    for (int s = 0; s < SIDES; ++s) sides[s].block.open(from(b, s));
#pragma GCC unroll 1
    for (int begin = 0; begin < L::PARTS; begin += UNROLLED) {
      CT_UNROLL
      for (int p = 0; p < UNROLLED; ++p) {
        fetch.go_on<SIDES * LANES * L::BYTES / L::PARTS>();
        CT_UNROLL
        for (int s = 0; s < SIDES; ++s) sides[s].add(from(b, s), begin + p, b * L::PARTS + begin + p, x);
      }
    }
  }
}

// The next rows arrive before they are read, but not long before: 16 KB ahead was 15% slower.
inline Fetch fetch_of(const Rows& rows, size_t group) {
  const uintptr_t begin = uintptr_t(rows.data);
  Fetch fetch{begin + (LANES_AHEAD > group * 5 / 4 ? LANES_AHEAD : group * 5 / 4),
              begin + size_t(rows.count) * rows.row_bytes, uintptr_t(rows.next)};
  if (fetch.at >= fetch.end) fetch.at += fetch.next - fetch.end, fetch.end = UINTPTR_MAX;
  return fetch;
}

template <int TYPE, int N>
void multiply_some(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  const size_t bytes = rows.row_bytes;
  Fetch fetch = fetch_of(rows, LANES * bytes);
  for (int32_t first = 0; first < rows.count; first += LANES) {
    const uint8_t* some[LANES];
    for (int32_t r = 0; r < LANES; ++r) {  // missing rows repeat the last one
      some[r] = rows.data + size_t(first + r < rows.count ? first + r : rows.count - 1) * bytes;
    }
    LaneSums<TYPE, N> lanes[1];
    auto from = [&](int32_t b, int) { return Apart{some, ptrdiff_t(b) * Lanes<TYPE>::BYTES}; };
    multiply_lanes<TYPE, N, 1>(from, rows.columns, fetch, x, lanes);
    const LaneFloats* sums = lanes[0].sums;
    if (first + LANES <= rows.count) {
      for (int32_t r = 0; r < x.rows; ++r) std::memcpy(out + r * stride + first, &sums[r], sizeof(LaneFloats));
    } else {
      const size_t found = size_t(rows.count - first) * sizeof(float);
      for (int32_t r = 0; r < x.rows; ++r) std::memcpy(out + r * stride + first, &sums[r], found);
    }
  }
}

// Whether N rows of inputs leave registers for the sums of a whole panel; otherwise its halves are read in turn.
template <int TYPE, int N>
constexpr bool takes_whole_panel() {
#ifdef __AVX512VL__
  return N <= (TYPE == CT_MXFP4 ? 4 : 8);
#else
  return N <= 2;
#endif
}

template <int TYPE, int N>
void multiply_interleaved_some(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  constexpr int BYTES = Lanes<TYPE>::BYTES * PANEL, SIDES = takes_whole_panel<TYPE, N>() ? PANEL / LANES : 1;
  Fetch fetch = fetch_of(rows, 0);
  const uint8_t* panel = rows.data;
  for (int32_t first = 0; first < rows.count; first += PANEL, panel += PANEL * rows.row_bytes) {
    for (int side = 0; side < PANEL; side += SIDES * LANES) {
      LaneSums<TYPE, N> sides[SIDES];
      auto from = [&](int32_t b, int s) { return Interleaved<TYPE>{panel + ptrdiff_t(b) * BYTES, side + s * LANES}; };
      multiply_lanes<TYPE, N, SIDES>(from, rows.columns, fetch, x, sides);
      for (int32_t r = 0; r < x.rows; ++r) {
        float* to = out + r * stride + first + side;
        for (int s = 0; s < SIDES; ++s) std::memcpy(to + s * LANES, &sides[s].sums[r], sizeof(LaneFloats));
      }
    }
  }
}

}  // namespace
}  // namespace chatterm

#ifdef __AVX512VNNI__
#include "products_avx512.h"
#endif

namespace chatterm {
namespace {

template <int TYPE>
void multiply_rows(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  by_rows(x.rows, [&](auto count) {
#ifdef __AVX512VNNI__
    if constexpr (is_small(TYPE) && count.value > 2) return multiply_panels<TYPE, count.value>(rows, x, out, stride);
#endif
    multiply_some<TYPE, count.value>(rows, x, out, stride);
  });
}

template <int TYPE>
void multiply_interleaved(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  by_rows(x.rows, [&](auto count) {
#ifdef __AVX512VNNI__
    if constexpr (count.value > 1) return multiply_interleaved_panels<TYPE, count.value>(rows, x, out, stride);
#endif
    multiply_interleaved_some<TYPE, count.value>(rows, x, out, stride);
  });
}

}  // namespace
}  // namespace chatterm
