// Attention of many queries: 64 rows of K and V are converted to fp32 once for all queries, and multiplied like
// matrices. Part of kernels_impl.h.
//
// The result of a query does not depend on the other queries: its sums have one order, and rows that it must not see
// add zeros.
#pragma once

#include "kernels.h"
#include "weigh.h"

namespace chatterm {
namespace {

constexpr int32_t TOGETHER = 6;  // queries whose sums fit into the registers

// c[M][N * WIDTH] += a[M][depth] * b[depth][N * WIDTH]
template <int M, int N>
inline void add_block(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t depth, float* c,
                           int32_t c_row) {
  Wide sums[M][N];
  CT_UNROLL
  for (int m = 0; m < M; ++m) {
    CT_UNROLL
    for (int n = 0; n < N; ++n) sums[m][n] = load_wide(c + m * c_row + n * WIDTH);
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

// c[M][N * WIDTH] = a[M][depth] * b[depth][N * WIDTH]; depth is a multiple of 8. The products of every eighth column
// are summed separately, and these sums are added in the order of `sum_of`, like those in the lanes of a vector in a
// decode step.
template <int M, int N>
inline void score_block(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t depth, float* c,
                        int32_t c_row) {
  Wide kept[3][M][N];  // the sum of one, of two, of four
  CT_UNROLL
  for (int j = 0; j < 8; ++j) {
    Wide sums[M][N];
    CT_UNROLL
    for (int m = 0; m < M; ++m) {
      CT_UNROLL
      for (int n = 0; n < N; ++n) sums[m][n] = Wide{};
    }
    for (int32_t k = j; k < depth; k += 8) {
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
      for (int n = 0; n < N; ++n) {
        Wide sum = sums[m][n];
        if (j % 2 == 1) sum += kept[0][m][n];
        if (j % 4 == 3) sum += kept[1][m][n];
        if (j == 7) store_wide(c + m * c_row + n * WIDTH, sum + kept[2][m][n]);
        kept[j % 2 == 0 ? 0 : j % 4 == 1 ? 1 : 2][m][n] = sum;
      }
    }
  }
}

template <int M, int N, bool SCORES>
inline void multiply_block(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t depth, float* c,
                           int32_t c_row) {
  (SCORES ? score_block<M, N> : add_block<M, N>)(a, a_row, b, b_row, depth, c, c_row);
}

template <int N, bool SCORES>
inline void multiply_columns(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t rows,
                             int32_t depth, float* c, int32_t c_row) {
  int32_t m = 0;
  for (; m + TOGETHER <= rows; m += TOGETHER) {
    multiply_block<TOGETHER, N, SCORES>(a + m * a_row, a_row, b, b_row, depth, c + m * c_row, c_row);
  }
  a += m * a_row;
  c += m * c_row;
  switch (rows - m) {
    case 5:
      return multiply_block<5, N, SCORES>(a, a_row, b, b_row, depth, c, c_row);
    case 4:
      return multiply_block<4, N, SCORES>(a, a_row, b, b_row, depth, c, c_row);
    case 3:
      return multiply_block<3, N, SCORES>(a, a_row, b, b_row, depth, c, c_row);
    case 2:
      return multiply_block<2, N, SCORES>(a, a_row, b, b_row, depth, c, c_row);
    case 1:
      return multiply_block<1, N, SCORES>(a, a_row, b, b_row, depth, c, c_row);
    default:
      return;
  }
}

// c[rows][columns] = a[rows][depth] * b[depth][columns]; without SCORES it is added to c. columns is a multiple of
// WIDTH.
template <bool SCORES>
void multiply_floats(const float* a, int32_t a_row, const float* b, int32_t b_row, int32_t rows, int32_t depth,
                     int32_t columns, float* c, int32_t c_row) {
  int32_t n = 0;
  for (; n + 2 * WIDTH <= columns; n += 2 * WIDTH) {
    multiply_columns<2, SCORES>(a, a_row, b + n, b_row, rows, depth, c + n, c_row);
  }
  if (n < columns) multiply_columns<1, SCORES>(a, a_row, b + n, b_row, rows, depth, c + n, c_row);
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

// Fills keys[dim][ATTEND_ROWS] and values[count][row]; columns from `count` up to a multiple of 8 become zeros.
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

template <typename Type>
void attend_chunk_as(const AttendChunk& a) {
  const int32_t row = padded(a.dim);  // length of a row of values and outputs
  for (int32_t i = 0; i < a.queries; ++i) a.most[i] = -3.0e38f, a.sum[i] = 0.0f;
  for (int32_t i = 0; i < a.queries * row; ++i) a.out[i] = 0.0f;
  const uint8_t *k[ATTEND_ROWS], *v[ATTEND_ROWS];
  for (int32_t first = a.first; first < a.end; first += ATTEND_ROWS) {
    const int32_t count = locate(a, first, k, v);
    widen<Type>(a, count, k, v, row);
    multiply_floats<true>(a.q, a.dim, a.keys, ATTEND_ROWS, a.queries, a.dim, ATTEND_ROWS, a.scores, ATTEND_ROWS);
    if constexpr (Type::SCALED) scale_rows(a.scores, a.queries, count, k, a.scales);
    for (int32_t i = 0; i < a.queries; ++i) {
      const int32_t seen = a.newest + 1 - (a.queries - 1 - i) / a.heads - first;  // up to the query's own row
      if (a.cap > 0.0f) cap(a.scores + i * ATTEND_ROWS, ATTEND_ROWS, a.cap);
      const float kept =
          weigh(a.scores + i * ATTEND_ROWS, a.window > 0 ? seen - a.window : 0, seen, a.most[i], a.sum[i]);
      if (kept != 1.0f) {
        for (int32_t d = 0; d < row; ++d) a.out[i * row + d] *= kept;
      }
    }
    if constexpr (Type::SCALED) scale_rows(a.scores, a.queries, count, v, a.scales);
    multiply_floats<false>(a.scores, ATTEND_ROWS, a.values, row, a.queries, count, row, a.out, row);
  }
}

void attend_chunk(const AttendChunk& given) {
  by_type(given.type, [&](auto type) { attend_chunk_as<decltype(type)>(given); });
}

}  // namespace
}  // namespace chatterm
