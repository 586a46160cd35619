// Turns the scores of a query into weights, with the same bits for decode steps and chunks. Part of kernels_impl.h.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

constexpr float LEAST = -60.0f;  // relative to the largest score: the weight is under 1e-26

#ifdef __AVX512F__
typedef float Wide __attribute__((vector_size(64)));
typedef int32_t WideInts __attribute__((vector_size(64)));
#else
typedef Floats Wide;
typedef Ints WideInts;
#endif
constexpr int32_t WIDTH = sizeof(Wide) / sizeof(float);

inline Wide load_wide(const float* p) { return load_as<Wide>(p); }

inline void store_wide(float* p, Wide v) { store_as(p, v); }

template <typename V, typename Merge>
inline Floats fold(V v, Merge merge) {
  if constexpr (sizeof(V) == sizeof(Floats)) {
    return v;
  } else {
    Floats parts[sizeof(V) / sizeof(Floats)];
    std::memcpy(parts, &v, sizeof v);
    for (int i = 1; i < WIDTH / 8; ++i) parts[0] = merge(parts[0], parts[i]);
    return parts[0];
  }
}

// x = most * tanh(x / most)
inline void cap(float* x, int32_t n, float most) {
  int32_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    store_wide(x + i, hyperbolic_tangent<Wide, WideInts>(load_wide(x + i) / most) * most);
  }
  for (; i < n; ++i) x[i] = hyperbolic_tangent<Floats, Ints>(splat(x[i] / most))[0] * most;
}

// Turns the scores of a query into weights, for rows first..seen - 1. Returns the factor for its sum and output so far.
inline float weigh(float* scores, int32_t first, int32_t seen, float& most, float& sum) {
  for (int32_t r = 0; r < first && r < ATTEND_ROWS; ++r) scores[r] = -__builtin_inff();
  for (int32_t r = seen > 0 ? seen : 0; r < ATTEND_ROWS; ++r) scores[r] = -__builtin_inff();
  Wide peaks = Wide{} + most;
  for (int32_t r = 0; r < ATTEND_ROWS; r += WIDTH) {
    const Wide v = load_wide(scores + r);
    peaks = choose(v > peaks, v, peaks);
  }
  const float now = largest_of(fold(peaks, larger));
  Wide total{};
  for (int32_t r = 0; r < ATTEND_ROWS; r += WIDTH) {
    const Wide below = load_wide(scores + r) - now;
    const Wide weight = choose(below < LEAST, Wide{}, exponential_within<Wide, WideInts>(below));
    store_wide(scores + r, weight);
    total += weight;
  }
  const float kept = now == most ? 1.0f : exponential(splat(most - now))[0];
  sum = sum * kept + sum_of(fold(total, [](Floats a, Floats b) { return a + b; }));
  most = now;
  return kept;
}

}  // namespace
}  // namespace chatterm
