// Products of weights in bf16 with inputs rounded to bf16, for AVX-512 with instructions for bf16.
//
// A sum has one vector, to which 32 columns are added at a time, so its order is the same for any number of rows.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace chatterm {
namespace {

// Rounds n numbers to bf16.
inline void to_halves(const float* x, int32_t n, uint16_t* out) {
  int32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm256_storeu_si256((__m256i*)(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
  }
  if (i == n) return;
  const __mmask16 rest = __mmask16((1u << (n - i)) - 1);
  _mm256_mask_storeu_epi16(out + i, rest, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(rest, x + i)));
}

// The sums of the numbers of four vectors.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
  auto half = [](__m512 v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); };
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

constexpr int32_t LINE = 32;  // numbers in a vector, and in a line of the cache
constexpr int32_t SHORT = 1024;  // rows of up to so many numbers are read in order for a few rows of inputs

// Calls part(i, load) for the numbers from every LINEth number i on; load(at) reads them, and zeros past the last one.
template <typename Part>
inline void by_lines(int32_t columns, const Part& part) {
  int32_t i = 0;
  for (; i + LINE <= columns; i += LINE) part(i, [](const void* at) { return (__m512bh)_mm512_loadu_si512(at); });
  if (i == columns) return;
  const __mmask32 rest = (1u << (columns - i)) - 1;
  part(i, [rest](const void* at) { return (__m512bh)_mm512_maskz_loadu_epi16(rest, at); });
}

// Stores the sums of up to four rows of a weight with each of N rows of inputs.
template <int N>
inline void store_sums(const __m512 (*sums)[N], int32_t count, float* out, int32_t stride) {
  CT_UNROLL
  for (int n = 0; n < N; ++n) {
    const __m128 four = sums_of(sums[0][n], sums[1][n], sums[2][n], sums[3][n]);
    _mm_mask_storeu_ps(out + n * stride, __mmask8((1 << count) - 1), four);
  }
}

// out[n * stride + m] = row n of N inputs times row m of `count` rows of a weight, up to four, which are read one after
// the other: in this order memory is fastest. They are prefetched `ahead` bytes before they are read.
template <int N>
void multiply_in_order(const uint8_t* row, size_t row_bytes, int32_t count, const Inputs& x, uintptr_t ahead, float* out,
                       int32_t stride) {
  __m512 sums[4][N];
  for (int m = 0; m < 4; ++m) {
    __m512 own[N];
    CT_UNROLL
    for (int n = 0; n < N; ++n) own[n] = _mm512_setzero_ps();
    if (m < count) {
      const uint8_t* from = row + m * row_bytes;
      by_lines(x.columns, [&](int32_t i, auto load) {
        __builtin_prefetch((const char*)(uintptr_t(from + 2 * i) + ahead));
        const __m512bh weight = load(from + 2 * i);
        CT_UNROLL
        for (int n = 0; n < N; ++n) own[n] = _mm512_dpbf16_ps(own[n], weight, load(x.halves + n * int64_t(x.columns) + i));
      });
    }
    CT_UNROLL
    for (int n = 0; n < N; ++n) sums[m][n] = own[n];
  }
  store_sums(sums, count, out, stride);
}

// The same for four rows of a weight and N of more rows of inputs, as many as there are registers for.
template <int N>
void multiply_together(const uint8_t* row, size_t row_bytes, const uint16_t* x, int32_t columns, uintptr_t ahead,
                       float* out, int32_t stride) {
  __m512 sums[4][N];
  CT_UNROLL
  for (int m = 0; m < 4; ++m) {
    CT_UNROLL
    for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
  }
  by_lines(columns, [&](int32_t i, auto load) {
    __m512bh weight[4];
    CT_UNROLL
    for (int m = 0; m < 4; ++m) {
      const uint8_t* from = row + m * row_bytes + 2 * i;
      __builtin_prefetch((const char*)(uintptr_t(from) + ahead));
      weight[m] = load(from);
    }
    CT_UNROLL
    for (int n = 0; n < N; ++n) {
      const __m512bh given = load(x + n * int64_t(columns) + i);
      CT_UNROLL
      for (int m = 0; m < 4; ++m) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], weight[m], given);
    }
  });
  store_sums(sums, 4, out, stride);
}

// Calls part with a number of rows of inputs, 1 to MOST, as a constant.
template <int MOST, typename Part>
inline void by_count(int32_t rows, const Part& part) {
  if constexpr (MOST > 1) {
    if (rows < MOST) return by_count<MOST - 1>(rows, part);
  }
  part(Constant<MOST>{});
}

void multiply_bf16(const Rows& rows, const Inputs& x, float* out, int32_t stride) {
  constexpr int MOST = 6;
  const uint8_t* end = rows.data + size_t(rows.count) * rows.row_bytes;
  for (int32_t i = 0; i < rows.count; i += 4) {
    const uint8_t* row = rows.data + size_t(i) * rows.row_bytes;
    const uintptr_t ahead = AHEAD + (AHEAD < size_t(end - row) ? 0 : uintptr_t(rows.next) - uintptr_t(end));
    const int32_t count = rows.count - i < 4 ? rows.count - i : 4;
    if (x.rows == 1 || (x.rows <= TILE && x.columns <= SHORT) || count < 4) {
      for (int32_t r = 0; r < x.rows; r += TILE) {
        Inputs some = x;
        some.halves += r * int64_t(x.columns);
        by_count<TILE>(x.rows - r < TILE ? x.rows - r : TILE, [&](auto n) {
          multiply_in_order<n.value>(row, rows.row_bytes, count, some, ahead, out + r * int64_t(stride) + i, stride);
        });
      }
      continue;
    }
    int32_t groups = (x.rows + MOST - 1) / MOST;
    for (int32_t r = 0, some; r < x.rows; r += some, --groups) {
      some = (x.rows - r + groups - 1) / groups;
      by_count<MOST>(some, [&](auto n) {
        multiply_together<n.value>(row, rows.row_bytes, x.halves + r * int64_t(x.columns), x.columns, r == 0 ? ahead : 0,
                                   out + r * int64_t(stride) + i, stride);
      });
    }
  }
}

}  // namespace
}  // namespace chatterm
