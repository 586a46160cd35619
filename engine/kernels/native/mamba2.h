// Mamba-2: the walk of a head over its rows. The plain twin is models/reference/mamba2.py. The rows of a state do not
// depend on each other, so a few at a time are walked over all rows of the text while they stay in the nearest cache.
// Part of kernels_impl.h.
#pragma once

#include "kernels.h"
#include "vectors.h"
#include "weigh.h"

namespace chatterm {
namespace {

constexpr int STATE_ROWS = 4;  // rows of a state, so that four sums are added up together

// Updates numbers i.. of STATE_ROWS rows of a state, each `stride` long, and adds their products with q.
template <typename V>
inline void update_some(const float* from, float* to, int32_t stride, float kept, const float* given, V key, V query,
                        V* sums) {
  CT_UNROLL
  for (int n = 0; n < STATE_ROWS; ++n) {
    const V state = load_as<V>(from + n * stride) * kept + key * given[n];
    store_as(to + n * stride, state);
    sums[n] += state * query;
  }
}

// Walks over all rows of the text with the rows of the state from `first` on.
void walk_state_rows(const HeadWalk& w, int32_t first) {
  static_assert(STATE_ROWS <= WALKED_TOGETHER);
  const int32_t size = w.key_dim, whole = size / WIDTH * WIDTH;
  const int64_t at = int64_t(first) * size;
  const float *from = w.from + at, *next = w.next == nullptr ? nullptr : w.next + at;
  for (int32_t row = 0; row < w.count; ++row) {
    const float* query = w.rows + int64_t(row) * (2 * size + w.value_dim);
    const float *key = query + size, *value = key + size + first;
    float* to = row + 1 == w.count ? w.to + at : w.part;
    const float kept = w.decay[row];
    float given[STATE_ROWS];
    for (int n = 0; n < STATE_ROWS; ++n) given[n] = value[n] * w.share[row];
    Wide wide[STATE_ROWS] = {};
    for (int32_t i = 0; i < whole; i += WIDTH) {
      if (next != nullptr) {
        CT_UNROLL
        for (int32_t n = 0; n < STATE_ROWS; ++n) __builtin_prefetch(next + n * size + i, 0, 2);
      }
      update_some(from + i, to + i, size, kept, given, load_wide(key + i), load_wide(query + i), wide);
    }
    Floats sums[STATE_ROWS];
    for (int n = 0; n < STATE_ROWS; ++n) sums[n] = fold(wide[n], [](Floats a, Floats b) { return a + b; });
    for (int32_t i = whole; i < size; i += 8) {
      update_some(from + i, to + i, size, kept, given, load(key + i), load(query + i), sums);
    }
    float* y = w.y + int64_t(row) * w.value_dim + first;
    sum_four(sums[0], sums[1], sums[2], sums[3], y);
    for (int n = 0; n < STATE_ROWS; ++n) y[n] += w.skip * value[n];
    from = to;
    next = nullptr;
  }
}

void walk_mamba(const HeadWalk& w) {
  for (int32_t first = 0; first < w.value_dim; first += STATE_ROWS) walk_state_rows(w, first);
}

}  // namespace
}  // namespace chatterm
