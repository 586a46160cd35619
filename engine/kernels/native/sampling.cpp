// A token from logits: what top-k, top-p and min-p leave of them, in this order, and one draw.
//
// Nothing is sorted but the likeliest: weights under ever smaller bounds are looked for until there are enough.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "kernels.h"

namespace chatterm {

namespace {

struct Likely {
  float weight, logit;
  int32_t id;
};

struct Weights {
  const float* logits;
  const float* weights;  // exp((logit - largest) / temperature)
  int32_t count;
  std::vector<double> sums;  // of every PIECE_OF_LOGITS
  std::vector<float> peaks;

  double sum() const {
    double all = 0.0;
    for (double one : sums) all += one;
    return all;
  }

  // Where `at` falls among the weights, one after the other.
  int32_t at(double at) const {
    size_t piece = 0;
    for (; piece + 1 < sums.size() && at >= sums[piece]; ++piece) at -= sums[piece];
    while (piece > 0 && peaks[piece] == 0.0f) --piece;  // rounded up, it lies behind the last one
    const int32_t first = int32_t(piece) * PIECE_OF_LOGITS;
    int32_t last = first;
    for (int32_t i = first; i < std::min(count, first + PIECE_OF_LOGITS); ++i) {
      if (weights[i] == 0.0f) continue;
      last = i;
      if ((at -= weights[i]) < 0.0) break;
    }
    return last;
  }

  // Those of `bound` and more, but none without weight.
  void above(float bound, std::vector<Likely>& found) const {
    found.clear();
    for (int32_t i = 0; i < count; ++i) {
      if (i % PIECE_OF_LOGITS == 0 && peaks[size_t(i / PIECE_OF_LOGITS)] < bound) {
        i += PIECE_OF_LOGITS - 1;
      } else if (weights[i] >= bound && weights[i] > 0.0f) {
        found.push_back({weights[i], logits[i], i});
      }
    }
  }
};

double sum_of(const std::vector<Likely>& some) {
  double sum = 0.0;
  for (const Likely& one : some) sum += one.weight;
  return sum;
}

int32_t choose(const Weights& all, const ct_sampling& how) {
  const bool some = how.top_k > 0 && how.top_k < all.count, nucleus = how.top_p < 1.0f;
  const double sum = all.sum();
  if (!some && !nucleus && how.min_p <= 0.0f) return all.at(how.chance * sum);
  std::vector<Likely> left;
  const float least = some || nucleus ? 0.0f : how.min_p;
  for (float bound = least > 0.0f ? least : 0.1f;; bound = bound < 1e-30f ? 0.0f : bound * 1e-2f) {
    all.above(bound, left);
    if (bound == least || (some ? left.size() >= size_t(how.top_k) : sum_of(left) >= how.top_p * sum)) break;
  }
  std::sort(left.begin(), left.end(), [](const Likely& a, const Likely& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  });
  if (some && left.size() > size_t(how.top_k)) left.resize(size_t(how.top_k));
  if (nucleus) {
    const double goal = how.top_p * (some ? sum_of(left) : sum);
    size_t kept = 1;
    for (double before = left[0].weight; kept < left.size() && before < goal; ++kept) before += left[kept].weight;
    left.resize(kept);
  }
  const float bound = how.min_p * left[0].weight;
  while (left.back().weight < bound) left.pop_back();
  // In an order that does not turn around where rounding does it to two that are nearly alike.
  std::sort(left.begin(), left.end(), [](const Likely& a, const Likely& b) { return a.id < b.id; });
  double at = how.chance * sum_of(left);
  for (const Likely& one : left) {
    if ((at -= one.weight) < 0.0) return one.id;
  }
  return left.back().id;
}

}  // namespace

}  // namespace chatterm

using namespace chatterm;

int32_t ct_sample(int32_t variant, const float* logits, int32_t count, const ct_sampling* how, float* room) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr || count < 1) return CT_IMPOSSIBLE;
  try {
    const float most = kernels->largest(logits, count);
    if (!std::isfinite(most)) return CT_NO_NUMBERS;
    const size_t pieces = size_t((count + PIECE_OF_LOGITS - 1) / PIECE_OF_LOGITS);
    Weights all{logits, room, count, std::vector<double>(pieces), std::vector<float>(pieces)};
    kernels->soften(logits, count, most, how->temperature, room, all.sums.data(), all.peaks.data());
    return choose(all, *how);
  } catch (const std::bad_alloc&) {
    return CT_IMPOSSIBLE;
  }
}

void ct_mask(const float* logits, int32_t count, const uint32_t* mask, float* out) {
  for (int32_t first = 0; first < count; first += 32) {
    const uint32_t word = mask[first / 32];
    const int32_t here = std::min(32, count - first);
    // Most words of a mask forbid everything.
    for (int32_t i = 0; i < here; ++i) out[first + i] = -INFINITY;
    for (uint32_t left = word; left != 0; left &= left - 1) {
      const int32_t i = __builtin_ctz(left);
      if (i < here) out[first + i] = logits[first + i];
    }
  }
}
