// Draws a token from logits: a mask, penalties, then top-k, top-p and min-p, in this order, and one draw.
//
// Only the likeliest tokens are sorted: weights above smaller and smaller bounds are collected until there are enough.
#include <algorithm>
#include <array>
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

  // Returns the token that `at` falls on when the weights are laid end to end.
  int32_t at(double at) const {
    size_t piece = 0;
    for (; piece + 1 < sums.size() && at >= sums[piece]; ++piece) at -= sums[piece];
    while (piece > 0 && peaks[piece] == 0.0f) --piece;  // through rounding, `at` lies behind the last weight
    const int32_t first = int32_t(piece) * PIECE_OF_LOGITS;
    int32_t last = first;
    for (int32_t i = first; i < std::min(count, first + PIECE_OF_LOGITS); ++i) {
      if (weights[i] == 0.0f) continue;
      last = i;
      if ((at -= weights[i]) < 0.0) break;
    }
    return last;
  }

  // Collects the tokens with a weight of at least `bound`, but none with weight 0.
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
  auto before = [](const Likely& a, const Likely& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  };
  if (some && left.size() > size_t(how.top_k)) {
    std::nth_element(left.begin(), left.begin() + how.top_k, left.end(), before);
    left.resize(size_t(how.top_k));
  }
  std::sort(left.begin(), left.end(), before);
  if (nucleus) {
    const double goal = how.top_p * (some ? sum_of(left) : sum);
    size_t kept = 1;
    for (double passed = left[0].weight; kept < left.size() && passed < goal; ++kept) passed += left[kept].weight;
    left.resize(kept);
  }
  const float bound = how.min_p * left[0].weight;
  while (left.back().weight < bound) left.pop_back();
  // In an order that does not depend on the rounding of two nearly equal logits.
  std::sort(left.begin(), left.end(), [](const Likely& a, const Likely& b) { return a.id < b.id; });
  double at = how.chance * sum_of(left);
  for (const Likely& one : left) {
    if ((at -= one.weight) < 0.0) return one.id;
  }
  return left.back().id;
}

// Calls part(i) for the few marks that are not 0, skipping 64 zeros at a time.
template <typename T, typename Part>
void for_marked(const T* marks, int32_t count, const Part& part) {
  constexpr int32_t TOGETHER = 64;
  for (int32_t first = 0; first < count; first += TOGETHER) {
    const int32_t end = std::min(first + TOGETHER, count);
    T any = 0;
    for (int32_t i = first; i < end; ++i) any |= marks[i];
    if (any == 0) continue;
    for (int32_t i = first; i < end; ++i) {
      if (marks[i]) part(i);
    }
  }
}

void penalise(const ct_sampling& how, int32_t count, float* logits) {
  if (how.seen != nullptr) {
    for_marked(how.seen, count, [&](int32_t i) {
      logits[i] = logits[i] > 0.0f ? logits[i] / how.repetition : logits[i] * how.repetition;
    });
  }
  if (how.generated != nullptr) {
    for_marked(how.generated, count, [&](int32_t i) {
      const float often = how.frequency * float(how.generated[i]);
      logits[i] = logits[i] - how.presence - often;
    });
  }
}

// Copies logits to `out`, with -inf for bits that the mask lacks. Most of its words have all bits set, or none.
void masked(const float* logits, const uint32_t* mask, int32_t count, float* out) {
  static constexpr auto BITS = [] {
    std::array<uint32_t, 32> bits{};
    for (int i = 0; i < 32; ++i) bits[size_t(i)] = 1u << i;
    return bits;
  }();
  for (int32_t first = 0; first < count; first += 32) {
    const uint32_t word = mask[first / 32];
    const int32_t here = std::min(32, count - first);
    const float* from = logits + first;
    float* to = out + first;
    if (word == 0u) {
      std::fill_n(to, here, -INFINITY);
    } else if (word == ~0u) {
      std::copy_n(from, here, to);
    } else {
      for (int32_t i = 0; i < here; ++i) to[i] = (word & BITS[size_t(i)]) != 0u ? from[i] : -INFINITY;
    }
  }
}

// Returns the first of the largest logits.
int32_t likeliest(const Kernels& kernels, const float* logits, int32_t count) {
  float most = -INFINITY;
  const float* piece = logits;
  for (int32_t first = 0; first < count; first += PIECE_OF_LOGITS) {
    const float here = kernels.largest(logits + first, std::min(PIECE_OF_LOGITS, count - first));
    if (std::isnan(here)) return CT_NO_NUMBERS;
    if (here > most) most = here, piece = logits + first;
  }
  return std::isfinite(most) ? int32_t(std::find(piece, logits + count, most) - logits) : int32_t(CT_NO_NUMBERS);
}

}  // namespace

}  // namespace chatterm

using namespace chatterm;

int32_t ct_sample(int32_t variant, const float* logits, const ct_sampling* how) {
  const int32_t count = how->count;
  float* room = how->room;
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr || count < 1) return CT_IMPOSSIBLE;
  if (how->seen != nullptr || how->generated != nullptr || how->mask != nullptr) {
    float* edited = room + count;
    if (how->mask != nullptr) {
      masked(logits, how->mask, count, edited);
    } else {
      std::copy_n(logits, count, edited);
    }
    penalise(*how, count, edited);
    logits = edited;
  }
  if (how->temperature == 0.0f) return likeliest(*kernels, logits, count);
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
