// Attention of many queries: a few at a time are multiplied with 64 rows of K and V, which the first of them convert to
// fp32 for the others. Part of kernels_impl.h.
//
// The result of a query does not depend on the other queries: its sums have one order, and rows that it must not see
// add zeros.
#pragma once

#include "kernels.h"
#include "weigh.h"

namespace chatterm {
namespace {

constexpr int32_t TOGETHER = 3;           // queries whose sums, for VECTORS vectors, just fit into the registers
constexpr int32_t VECTORS = 4;            // vectors of K or V that are multiplied with them
constexpr int32_t SIDE = WIDTH / 8;       // rows of K in a vector: eight numbers of each
constexpr int32_t KEYS = VECTORS * SIDE;  // rows of K that are multiplied side by side
constexpr int32_t ASK_ROWS = 16;          // rows of V between two requests for later rows

#if !defined __AVX512F__
#define CT_HOLD(v)
#elif !defined CT_HOLD
#define CT_HOLD(v) asm("" : "+v"(v))  // in a register: otherwise each product would load it again
#endif

// Calls part(M, first) for all queries, M at a time: M is their number as a constant, and one is alone only if there is
// no other.
template <typename Part>
inline void by_queries(int32_t queries, const Part& part) {
  int32_t first = 0;
  for (int32_t left = queries; left > TOGETHER + 1 || left == TOGETHER; left -= TOGETHER, first += TOGETHER) {
    part(Constant<TOGETHER>{}, first);
  }
  for (; queries - first > 1; first += 2) part(Constant<2>{}, first);
  if (first < queries) part(Constant<1>{}, first);
}

// A vector of part(0), part(1), ..., eight numbers each. Not through memory: a load waits for two smaller stores.
template <typename Part>
inline Wide joined(const Part& part) {
#ifdef __AVX512F__
  static_assert(SIDE == 2);
  return (Wide)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)part(0)), (__m256)part(1), 1);
#else
  static_assert(SIDE == 1);
  return part(0);
#endif
}

// The same eight numbers in all places.
inline Wide repeated(const float* p) {
#ifdef __AVX512F__
  return (Wide)_mm512_broadcast_f32x8((__m256)load(p));
#else
  return load(p);
#endif
}

// The numbers of a row from d on; zeros after the last one.
template <typename Type>
inline Wide widen(const uint8_t* row, int32_t d, int32_t dim) {
  return joined([&](int i) {
    return i == 0 || d + 8 * i < dim ? Type::eight(row + (d + 8 * i) * Type::BYTES) : Floats{};
  });
}

// Eight numbers of each of SIDE rows, VECTORS apart.
template <typename Type>
inline Wide widen_beside(const uint8_t* const* rows, int32_t d) {
  return joined([&](int i) { return Type::eight(rows[i * VECTORS] + d * Type::BYTES); });
}

// The sums of each eight numbers, in the order of `sum_of`: out[KEYS], the first eight of all vectors come first.
inline void sum_eights(const Wide* v, float* out) {
#ifdef __AVX512F__
  const auto pairs = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
  };
  const __m512 fours = pairs(pairs((__m512)v[0], (__m512)v[1]), pairs((__m512)v[2], (__m512)v[3]));
  const __m512 halves = _mm512_shuffle_f32x4(fours, fours, 0xd8);  // the first halves of all eights, the second ones
  _mm256_storeu_ps(out, _mm256_add_ps(_mm512_castps512_ps256(halves), _mm512_extractf32x8_ps(halves, 1)));
#else
  static_assert(SIDE == 1);
  sum_four(v[0], v[1], v[2], v[3], out);
#endif
}

// The K or V of up to ATTEND_ROWS rows.
struct Tile {
  const uint8_t* rows[ATTEND_ROWS];
  int32_t count;
};

// The rows that come next. They are prefetched while others are multiplied, a few lines at a time: the processor waits
// where many are missing at once.
struct Later : Tile {
  int32_t bytes, row, byte, step;  // of a row; where the next line is; lines at a time

  // Spreads the lines over so many calls of `ask`.
  void spread(int32_t calls) {
    row = byte = 0;
    step = (count * ((bytes + 63) / 64) + calls - 1) / calls;
  }
  void ask() {
    for (int32_t i = 0; i < step && row < count; ++i) {
      __builtin_prefetch(rows[row] + byte, 0, 2);
      if ((byte += 64) >= bytes) byte = 0, ++row;
    }
  }
};

// scores[M][rows] = q[M][dim] times rows of K. The products of every eighth column are summed separately, and these
// sums are added in the order of `sum_of`, as in a decode step. With FIRST, the rows are converted to `keys`
// [rows / KEYS][dim / 8][KEYS][8]; without it they are read from there. Inlined, the sums would not stay in registers.
template <typename Type, int M, bool FIRST>
[[gnu::noinline]] void score_tile(const float* q, int32_t dim, const Tile& tile, Later& later, float* keys,
                                  float* scores) {
  for (int32_t r = 0; r < tile.count; r += KEYS, keys += KEYS * dim) {
    later.ask();
    Wide sums[M][VECTORS] = {};
    for (int32_t d = 0; d < dim; d += 8) {
      Wide query[M];
      CT_UNROLL
      for (int m = 0; m < M; ++m) query[m] = repeated(q + m * dim + d);
      CT_UNROLL
      for (int n = 0; n < VECTORS; ++n) {
        float* place = keys + VECTORS * SIDE * d + n * WIDTH;
        Wide key = FIRST ? widen_beside<Type>(tile.rows + r + n, d) : load_wide(place);
        CT_HOLD(key);
        if (FIRST) store_wide(place, key);
        CT_UNROLL
        for (int m = 0; m < M; ++m) sums[m][n] += query[m] * key;
      }
    }
    CT_UNROLL
    for (int m = 0; m < M; ++m) sum_eights(sums[m], scores + m * ATTEND_ROWS + r);
  }
}

// out[M][N * WIDTH] += weights[M][rows] times columns from d on of rows of V, converted to or read from `values`
// [rows][padded(dim)].
template <typename Type, int M, int N, bool FIRST>
[[gnu::noinline]] void mix_tile(const float* weights, int32_t dim, int32_t d, const Tile& tile, Later& later,
                                float* values, float* out) {
  const int32_t wide = padded(dim);
  Wide sums[M][N];
  CT_UNROLL
  for (int m = 0; m < M; ++m) {
    CT_UNROLL
    for (int n = 0; n < N; ++n) sums[m][n] = load_wide(out + m * wide + d + n * WIDTH);
  }
  for (int32_t r = 0; r < tile.count;) {
    later.ask();
    for (const int32_t end = r + ASK_ROWS < tile.count ? r + ASK_ROWS : tile.count; r < end; ++r) {
      Wide weight[M];
      CT_UNROLL
      for (int m = 0; m < M; ++m) weight[m] = weights[m * ATTEND_ROWS + r] - Wide{};  // copied to all places
      float* place = values + r * wide + d;
      CT_UNROLL
      for (int n = 0; n < N; ++n) {
        Wide value = FIRST ? widen<Type>(tile.rows[r], d + n * WIDTH, dim) : load_wide(place + n * WIDTH);
        CT_HOLD(value);
        if (FIRST) store_wide(place + n * WIDTH, value);
        CT_UNROLL
        for (int m = 0; m < M; ++m) sums[m][n] += value * weight[m];
      }
    }
  }
  CT_UNROLL
  for (int m = 0; m < M; ++m) {
    CT_UNROLL
    for (int n = 0; n < N; ++n) store_wide(out + m * wide + d + n * WIDTH, sums[m][n]);
  }
}

template <typename Type, int M, bool FIRST>
inline void mix_tiles(const float* weights, int32_t dim, const Tile& tile, Later& later, float* values, float* out) {
  int32_t d = 0;
  for (; d + VECTORS * WIDTH <= dim; d += VECTORS * WIDTH) {
    mix_tile<Type, M, VECTORS, FIRST>(weights, dim, d, tile, later, values, out);
  }
  for (; d < dim; d += WIDTH) mix_tile<Type, M, 1, FIRST>(weights, dim, d, tile, later, values, out);
}

template <typename Type>
void attend_chunk_as(const AttendChunk& a, const CachedRows* later) {
  const int32_t wide = padded(a.v_dim);  // length of a row of values and outputs
  for (int32_t i = 0; i < a.queries; ++i) a.most[i] = -3.0e38f, a.sum[i] = 0.0f;
  for (int32_t i = 0; i < a.queries * wide; ++i) a.out[i] = 0.0f;
  const int32_t blocks = (a.queries + TOGETHER - 1) / TOGETHER;
  const int32_t pieces = (a.v_dim + VECTORS * WIDTH - 1) / (VECTORS * WIDTH);
  Tile k, v;
  Later later_k, later_v;
  later_k.bytes = a.dim * Type::BYTES;
  later_v.bytes = a.v_dim * Type::BYTES;
  auto look_ahead = [&](const CachedRows& there, int32_t first) {
    later_k.count = later_v.count = locate(there, first, later_k.rows, later_v.rows);
  };
  look_ahead(a, a.first);
  for (int32_t first = a.first; first < a.end; first += ATTEND_ROWS) {
    k = later_k, v = later_v;
    const int32_t count = k.count, next = first + ATTEND_ROWS;
    for (int32_t r = count; r % KEYS != 0; ++r) k.rows[r] = k.rows[count - 1];
    later_k.count = later_v.count = 0;
    if (next < a.end) {
      look_ahead(a, next);
    } else if (later != nullptr) {
      look_ahead(*later, later->first);
    }
    later_k.spread(blocks * ((count + KEYS - 1) / KEYS));
    later_v.spread(blocks * pieces * ((count + ASK_ROWS - 1) / ASK_ROWS));
    by_queries(a.queries, [&](auto some, int32_t i) {
      const float* q = a.q + i * a.dim;
      float* scores = a.scores + i * ATTEND_ROWS;
      if (i == 0) return score_tile<Type, some.value, true>(q, a.dim, k, later_k, a.keys, scores);
      score_tile<F32, some.value, false>(q, a.dim, k, later_k, a.keys, scores);
    });
    if constexpr (Type::SCALED) scale_rows(a.scores, a.queries, count, k.rows, a.scales);
    for (int32_t i = 0; i < a.queries; ++i) {
      const int32_t seen = a.newest + 1 - (a.queries - 1 - i) / a.heads - first;  // up to the query's own row
      if (a.cap > 0.0f) cap(a.scores + i * ATTEND_ROWS, ATTEND_ROWS, a.cap);
      const float kept =
          weigh(a.scores + i * ATTEND_ROWS, a.window > 0 ? seen - a.window : 0, seen, a.most[i], a.sum[i]);
      if (kept != 1.0f) {
        for (int32_t d = 0; d < wide; ++d) a.out[i * wide + d] *= kept;
      }
    }
    if constexpr (Type::SCALED) scale_rows(a.scores, a.queries, count, v.rows, a.scales);
    by_queries(a.queries, [&](auto some, int32_t i) {
      const float* weights = a.scores + i * ATTEND_ROWS;
      float* out = a.out + i * wide;
      if (i == 0) return mix_tiles<Type, some.value, true>(weights, a.v_dim, v, later_v, a.values, out);
      mix_tiles<F32, some.value, false>(weights, a.v_dim, v, later_v, a.values, out);
    });
  }
}

void attend_chunk(const AttendChunk& given, const CachedRows* later) {
  by_type(given.type, [&](auto type) { attend_chunk_as<decltype(type)>(given, later); });
}

}  // namespace
}  // namespace chatterm
