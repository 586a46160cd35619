// Turns logits into weights. Part of kernels_impl.h.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

float largest(const float* x, int32_t n) {
  Floats most = splat(x[0]), poison{};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const Floats v = load(x + i);
    most = larger(v, most);
    poison = choose(v == v, poison, v);
  }
  float found = largest_of(most) + sum_of(poison);
  for (; i < n; ++i) found = x[i] > found || x[i] != x[i] ? x[i] : found;
  return found;
}

void soften(const float* x, int32_t n, float most, float temperature, float* out, double* sums, float* peaks) {
  const Floats top = splat(most), divisor = splat(temperature);
  auto eight = [&](const float* from) {
    const Floats below = (load(from) - top) / divisor;
    return choose(below < -87.0f, Floats{}, exponential(below));
  };
  for (int32_t first = 0; first < n; first += PIECE_OF_LOGITS) {
    const int32_t end = n - first < PIECE_OF_LOGITS ? n : first + PIECE_OF_LOGITS;
    Floats sum{}, peak{};
    int32_t i = first;
    for (; i + 8 <= end; i += 8) {
      const Floats weight = eight(x + i);
      store(out + i, weight);
      sum += weight;
      peak = larger(weight, peak);
    }
    if (i < end) {
      float rest[8];
      for (int32_t j = 0; j < 8; ++j) rest[j] = i + j < end ? x[i + j] : -__builtin_inff();
      const Floats weight = eight(rest);
      store(rest, weight);
      std::memcpy(out + i, rest, size_t(end - i) * sizeof(float));
      sum += weight;
      peak = larger(weight, peak);
    }
    *sums++ = double(sum_of(sum));
    *peaks++ = largest_of(peak);
  }
}

}  // namespace
}  // namespace chatterm
