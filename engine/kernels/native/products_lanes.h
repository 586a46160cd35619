// Products with quantised rows whose numbers lie side by side in the lanes of a vector.
//
// LANES rows are multiplied at once: lane r of a vector has the numbers of row r, and unpacked numbers are multiplied
// with up to TILE rows of inputs. So sums have the same order as those of panels (panels.h), to the bit.
#pragma once

#include "interleave.h"
#include "kernels.h"
#include "vectors.h"

#ifdef __AVX2__
#include "lanes_avx2.h"
#else
#include "lanes_neon.h"
#endif

#include "lanes.h"

namespace chatterm {
namespace {

constexpr size_t LANES_AHEAD = 4096;  // replaces AHEAD in these products

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
    for (int i = 0; i < SIZE; i += 64) __builtin_prefetch((const char*)(at + i));
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
        if (!SIGNED) sums[r] = fused(low, spread(lows[(n * GROUPS + g) * WIDE + r]), sums[r]);
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
  constexpr int SIDES = sides_apart<TYPE, N>(), TOGETHER = SIDES * LANES;
  const size_t bytes = rows.row_bytes;
  Fetch fetch = fetch_of(rows, TOGETHER * bytes);
  for (int32_t first = 0; first < rows.count; first += TOGETHER) {
    const uint8_t* some[TOGETHER];
    for (int32_t r = 0; r < TOGETHER; ++r) {  // missing rows repeat the last one
      some[r] = rows.data + size_t(first + r < rows.count ? first + r : rows.count - 1) * bytes;
    }
    LaneSums<TYPE, N> sides[SIDES];
    auto from = [&](int32_t b, int s) { return Apart{some + s * LANES, ptrdiff_t(b) * Lanes<TYPE>::BYTES}; };
    multiply_lanes<TYPE, N, SIDES>(from, rows.columns, fetch, x, sides);
    LaneFloats sums[N][SIDES];
    CT_UNROLL
    for (int r = 0; r < N; ++r) {
      CT_UNROLL
      for (int s = 0; s < SIDES; ++s) sums[r][s] = sides[s].sums[r];
    }
    const int32_t left = rows.count - first;
    if (left >= TOGETHER) {
      CT_UNROLL
      for (int r = 0; r < N; ++r) std::memcpy(out + r * stride + first, sums[r], sizeof sums[r]);
    } else {
      LaneFloats last[N][SIDES];
      std::memcpy(last, sums, sizeof last);
      for (int32_t r = 0; r < N; ++r) std::memcpy(out + r * stride + first, last[r], size_t(left) * sizeof(float));
    }
  }
}

template <int TYPE, int N>
void multiply_interleaved_some(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  constexpr int BYTES = Lanes<TYPE>::BYTES * PANEL, SIDES = sides_of<TYPE, N>();
  Fetch fetch = fetch_of(rows, 0);
  const uint8_t* panel = rows.data;
  for (int32_t first = 0; first < rows.count; first += PANEL, panel += PANEL * rows.row_bytes) {
    for (int side = 0; side < PANEL; side += SIDES * LANES) {
      LaneSums<TYPE, N> sides[SIDES];
      auto from = [&](int32_t b, int s) { return Interleaved<TYPE>{panel + ptrdiff_t(b) * BYTES, side + s * LANES}; };
      multiply_lanes<TYPE, N, SIDES>(from, rows.columns, fetch, x, sides);
      CT_UNROLL
      for (int r = 0; r < N; ++r) {
        CT_UNROLL
        for (int s = 0; s < SIDES; ++s) store_as(out + r * stride + first + side + s * LANES, sides[s].sums[r]);
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
