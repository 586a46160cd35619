// Gated delta nets: the walk of a head over its rows. The plain twin is models/reference/delta_net.py. The columns of a
// state do not depend on each other, so a few at a time are walked over all rows while they stay in the nearest cache.
// Part of kernels_impl.h.
#pragma once

#include "kernels.h"
#include "vectors.h"
#include "weigh.h"

namespace chatterm {
namespace {

// Divides n numbers by their length, and multiplies them by `scale`.
inline void make_unit(float* x, int32_t n, float scale) {
  constexpr float EPS = 1e-6f;
  Floats squares{};
  for (int32_t i = 0; i < n; i += 8) squares += load(x + i) * load(x + i);
  const float factor = scale / __builtin_sqrtf(sum_of(squares) + EPS);
  for (int32_t i = 0; i < n; i += 8) store(x + i, load(x + i) * factor);
}

// Walks over all rows with N vectors of columns from `first` on. The products k @ S of the next row are summed while S
// changes, with the next row of the last row being itself: so there is one loop, whose bits do not depend on the number
// of rows.
template <typename V, int N>
void walk_columns(const HeadWalk& d, int32_t first) {
  constexpr int32_t WIDTH = sizeof(V) / sizeof(float), COLUMNS = N * WIDTH;
  const int32_t stride = 2 * d.key_dim + d.value_dim;
  const float* next = d.next == nullptr ? nullptr : d.next + int64_t(first) * d.key_dim;
  const float *from = d.from + first, *key = d.rows + d.key_dim;
  int64_t from_stride = d.value_dim;
  V found[N] = {};
  for (int32_t i = 0; i < d.key_dim; ++i) {
    if (next != nullptr) {
      CT_UNROLL
      for (int32_t at = 0; at < COLUMNS; at += 16) __builtin_prefetch(next + i * COLUMNS + at, 0, 2);
    }
    CT_UNROLL
    for (int n = 0; n < N; ++n) found[n] += load_as<V>(from + i * from_stride + n * WIDTH) * key[i];
  }
  for (int32_t row = 0; row < d.count; ++row) {
    const bool last = row + 1 == d.count;
    const float *query = d.rows + int64_t(row) * stride, *value = query + 2 * d.key_dim + first;
    const float* later = last ? key : key + stride;
    float* to = last ? d.to + first : d.part;
    const int64_t to_stride = last ? d.value_dim : COLUMNS;
    const float kept = d.decay[row];
    V change[N], y[N] = {}, sums[N] = {};
    CT_UNROLL
    for (int n = 0; n < N; ++n) change[n] = (load_as<V>(value + n * WIDTH) - found[n] * kept) * d.share[row];
    for (int32_t i = 0; i < d.key_dim; ++i) {
      CT_UNROLL
      for (int n = 0; n < N; ++n) {
        const V state = load_as<V>(from + i * from_stride + n * WIDTH) * kept + change[n] * key[i];
        store_as(to + i * to_stride + n * WIDTH, state);
        y[n] += state * query[i];
        sums[n] += state * later[i];
      }
    }
    std::memcpy(d.y + int64_t(row) * d.value_dim + first, y, sizeof y);
    std::memcpy(found, sums, sizeof sums);
    from = to;
    from_stride = to_stride;
    key = later;
  }
}

void walk_delta(const HeadWalk& d) {
  static_assert(2 * WIDTH <= WALKED_TOGETHER);
  const float root = 1.0f / __builtin_sqrtf(float(d.key_dim));
  for (int32_t row = 0; row < d.count; ++row) {
    float* q = d.rows + int64_t(row) * (2 * d.key_dim + d.value_dim);
    make_unit(q, d.key_dim, root);
    make_unit(q + d.key_dim, d.key_dim, 1.0f);
  }
  int32_t first = 0;
  for (; first + 2 * WIDTH <= d.value_dim; first += 2 * WIDTH) walk_columns<Wide, 2>(d, first);
  for (; first + WIDTH <= d.value_dim; first += WIDTH) walk_columns<Wide, 1>(d, first);
  for (; first < d.value_dim; first += 8) walk_columns<Floats, 1>(d, first);
}

}  // namespace
}  // namespace chatterm
