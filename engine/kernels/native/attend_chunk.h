// Attention of many queries: 64 rows of K and V become fp32 once for all of them, and are multiplied as matrices are.
// Part of kernels_impl.h.
//
// What a query gets does not depend on those beside it: its sums have one order, and rows it must not see add zeros.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

#ifdef __AVX512F__
typedef float Wide __attribute__((vector_size(64)));
typedef int32_t WideInts __attribute__((vector_size(64)));
#else
typedef Floats Wide;
typedef Ints WideInts;
#endif
constexpr int32_t WIDTH = sizeof(Wide) / sizeof(float);
constexpr int32_t TOGETHER = 6;  // queries whose sums fit the registers

inline Wide load_wide(const float* p) {
  Wide v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store_wide(float* p, Wide v) { std::memcpy(p, &v, sizeof v); }

// c[M][N * WIDTH] (+)= a[M][depth] * b[depth][N * WIDTH]
template <int M, int N, bool FRESH>
inline void multiply_block(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t depth, float* c,
                           int32_t c_row) {
  Wide sums[M][N];
  CT_UNROLL
  for (int m = 0; m < M; ++m) {
    CT_UNROLL
    for (int n = 0; n < N; ++n) sums[m][n] = FRESH ? Wide{} : load_wide(c + m * c_row + n * WIDTH);
  }
  for (int32_t k = 0; k < depth; ++k) {
    Wide right[N];
    CT_UNROLL
    for (int n = 0; n < N; ++n) right[n] = load_wide(b + k * b_row + n * WIDTH);
    CT_UNROLL
    for (int m = 0; m < M; ++m) {
      CT_UNROLL
      for (int n = 0; n < N; ++n) sums[m][n] += right[n] * a[m * a_row + k];
    }
  }
  CT_UNROLL
  for (int m = 0; m < M; ++m) {
    CT_UNROLL
    for (int n = 0; n < N; ++n) store_wide(c + m * c_row + n * WIDTH, sums[m][n]);
  }
}

template <int N, bool FRESH>
inline void multiply_columns(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t rows,
                             int32_t depth, float* c, int32_t c_row) {
  int32_t m = 0;
  for (; m + TOGETHER <= rows; m += TOGETHER) {
    multiply_block<TOGETHER, N, FRESH>(a + m * a_row, a_row, b, b_row, depth, c + m * c_row, c_row);
  }
  a += m * a_row;
  c += m * c_row;
  switch (rows - m) {
    case 5:
      return multiply_block<5, N, FRESH>(a, a_row, b, b_row, depth, c, c_row);
    case 4:
      return multiply_block<4, N, FRESH>(a, a_row, b, b_row, depth, c, c_row);
    case 3:
      return multiply_block<3, N, FRESH>(a, a_row, b, b_row, depth, c, c_row);
    case 2:
      return multiply_block<2, N, FRESH>(a, a_row, b, b_row, depth, c, c_row);
    case 1:
      return multiply_block<1, N, FRESH>(a, a_row, b, b_row, depth, c, c_row);
    default:
      return;
  }
}

// c[rows][columns] (+)= a[rows][depth] * b[depth][columns]; columns is a multiple of WIDTH
template <bool FRESH>
void multiply_floats(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t rows, int32_t depth,
                     int32_t columns, float* c, int32_t c_row) {
  int32_t n = 0;
  for (; n + 2 * WIDTH <= columns; n += 2 * WIDTH) {
    multiply_columns<2, FRESH>(a, a_row, b + n, b_row, rows, depth, c + n, c_row);
  }
  if (n < columns) multiply_columns<1, FRESH>(a, a_row, b + n, b_row, rows, depth, c + n, c_row);
}

inline void transpose_floats(Floats* rows) {
#ifdef __AVX2__
  transpose((__m256i*)rows);
#else
  Floats columns[8];
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) columns[i][j] = rows[j][i];
  }
  for (int i = 0; i < 8; ++i) rows[i] = columns[i];
#endif
}

// keys[dim][ATTEND_ROWS] and values[count][row]; columns from `count` on are zeros up to a multiple of 8
template <typename Type>
void widen(const AttendChunk& a, int32_t count, const uint8_t* const* k, const uint8_t* const* v, int32_t row) {
  for (int32_t r = 0; r < ATTEND_ROWS; r += 8) {
    for (int32_t d = 0; d < a.dim; d += 8) {
      Floats rows[8];
      CT_UNROLL
      for (int i = 0; i < 8; ++i) rows[i] = r + i < count ? Type::eight(k[r + i] + d * Type::BYTES) : Floats{};
      transpose_floats(rows);
      CT_UNROLL
      for (int i = 0; i < 8; ++i) store(a.keys + (d + i) * ATTEND_ROWS + r, rows[i]);
    }
  }
  for (int32_t r = 0; r < count; ++r) {
    for (int32_t d = 0; d < a.dim; d += 8) store(a.values + r * row + d, Type::eight(v[r] + d * Type::BYTES));
  }
}

template <typename Merge>
inline Floats fold(Wide v, Merge merge) {
  Floats parts[WIDTH / 8];
  std::memcpy(parts, &v, sizeof v);
  for (int i = 1; i < WIDTH / 8; ++i) parts[0] = merge(parts[0], parts[i]);
  return parts[0];
}

// The scores of a query become weights; returns what its sum and output so far are multiplied with.
inline float weigh(float* scores, int32_t seen, float& most, float& sum) {
  for (int32_t r = seen > 0 ? seen : 0; r < ATTEND_ROWS; ++r) scores[r] = -__builtin_inff();
  Wide peaks = Wide{} + most;
  for (int32_t r = 0; r < ATTEND_ROWS; r += WIDTH) {
    const Wide v = load_wide(scores + r);
    peaks = v > peaks ? v : peaks;
  }
  const float now = largest_of(fold(peaks, larger));
  Wide total{};
  for (int32_t r = 0; r < ATTEND_ROWS; r += WIDTH) {
    const Wide below = load_wide(scores + r) - now;
    const Wide weight = below < LEAST ? Wide{} : exponential<Wide, WideInts>(below);
    store_wide(scores + r, weight);
    total += weight;
  }
  const float kept = now == most ? 1.0f : exponential(splat(most - now))[0];
  sum = sum * kept + sum_of(fold(total, [](Floats a, Floats b) { return a + b; }));
  most = now;
  return kept;
}

template <typename Type>
void attend_chunk_as(const AttendChunk& a) {
  const int32_t row = padded(a.dim);  // of values and outputs
  for (int32_t i = 0; i < a.queries; ++i) a.most[i] = -3.0e38f, a.sum[i] = 0.0f;
  for (int32_t i = 0; i < a.queries * row; ++i) a.out[i] = 0.0f;
  const uint8_t *k[ATTEND_ROWS], *v[ATTEND_ROWS];
  for (int32_t first = a.first; first < a.end; first += ATTEND_ROWS) {
    const int32_t count = locate(a, first, k, v);
    widen<Type>(a, count, k, v, row);
    multiply_floats<true>(a.q, a.dim, a.keys, ATTEND_ROWS, a.queries, a.dim, ATTEND_ROWS, a.scores, ATTEND_ROWS);
    for (int32_t i = 0; i < a.queries; ++i) {
      const int32_t newer = (a.queries - 1 - i) / a.heads;  // rows that the query must not see
      const float kept = weigh(a.scores + i * ATTEND_ROWS, a.newest + 1 - newer - first, a.most[i], a.sum[i]);
      if (kept != 1.0f) {
        for (int32_t d = 0; d < row; ++d) a.out[i * row + d] *= kept;
      }
    }
    multiply_floats<false>(a.scores, ATTEND_ROWS, a.values, row, a.queries, count, row, a.out, row);
  }
}

void attend_chunk(const AttendChunk& given) {
  switch (given.type) {
    case CT_F32:
      return attend_chunk_as<F32>(given);
    case CT_BF16:
      return attend_chunk_as<BF16>(given);
    default:
      return attend_chunk_as<F16>(given);
  }
}

}  // namespace
}  // namespace chatterm
