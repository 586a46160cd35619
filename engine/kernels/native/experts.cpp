// Chooses experts, and arranges the visits that follow.
#include "experts.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "decoder.h"
#include "vectors.h"

namespace chatterm {

namespace {

constexpr float NEVER = -__builtin_inff();  // the rank of an expert that is not chosen any more

int32_t visitors(const ct_experts& layer) { return layer.count + (layer.shared != nullptr); }

// Turns scores into shares: the sigmoid of each, or the softmax of all. `count` is a multiple of 8.
void weigh(float* scores, int32_t count, bool sigmoid) {
  if (sigmoid) {
    for (int32_t i = 0; i < count; i += 8) store(scores + i, 1.0f / (1.0f + exponential(-load(scores + i))));
    return;
  }
  float most = scores[0], sum = 0.0f;
  for (int32_t i = 1; i < count; ++i) most = scores[i] > most ? scores[i] : most;
  for (int32_t i = 0; i < count; i += 8) {
    const Floats weight = exponential(load(scores + i) - most);
    store(scores + i, weight);
    sum += sum_of(weight);
  }
  for (int32_t i = 0; i < count; ++i) scores[i] /= sum;
}

}  // namespace

MixtureSizes::MixtureSizes(const ct_model& model) {
  auto grow = [](int32_t& most, int32_t value) { most = value > most ? value : most; };
  for (int32_t i = 0; i < model.layer_count; ++i) {
    const ct_experts* layer = model.layers[i].experts;
    if (layer == nullptr) continue;
    grow(experts, visitors(*layer));
    grow(taken, taken_by_a_row(*layer));
    grow(outputs, rows_of(layer->router));
    for (int32_t e = 0; e < layer->count; ++e) grow(inner, inner_of(layer->experts[e]));
    if (layer->shared != nullptr) grow(inner, inner_of(*layer->shared));
  }
}

int32_t MixtureSizes::places(int32_t rows) const {
  const int32_t all = rows * taken;
  return all + (TILE - 1) * (experts < all ? experts : all);
}

Visits::Visits(const MixtureSizes& sizes, int32_t rows) {
  own.reserve(size_t(sizes.taken));
  all.reserve(size_t(sizes.experts));
  gatherings.reserve(size_t(sizes.places(rows)));
  row.resize(size_t(sizes.places(rows)));
  share.resize(size_t(sizes.places(rows)));
  counts.resize(size_t(sizes.experts));
  scores.resize(up_to(sizes.outputs, 8));
  ranks.resize(size_t(sizes.outputs));
  best.resize(size_t(sizes.outputs));
  groups.reserve(size_t(sizes.outputs));
}

void Visits::choose(const ct_experts& layer, const float* outputs, Choice* out) {
  const int32_t count = layer.count, wide = int32_t(up_to(count, 8));
  constexpr float LEAST = -3.0e38f;
  for (int32_t i = 0; i < wide; ++i) scores[size_t(i)] = i < count ? layer.router_scale * outputs[i] : NEVER;
  weigh(scores.data(), wide, layer.sigmoid);
  for (int32_t i = 0; i < count; ++i) {
    const float rank = scores[size_t(i)] + (layer.selection_bias != nullptr ? layer.selection_bias[i] : 0.0f);
    // NaN is chosen first, so that it shows.
    ranks[size_t(i)] = rank > LEAST ? rank : rank <= LEAST ? LEAST : -LEAST;
  }
  if (layer.groups > 1) leave_groups(layer);
  float sum = 0.0f;
  for (int32_t n = 0; n < layer.chosen; ++n) {
    int32_t best = 0;
    for (int32_t i = 1; i < count; ++i) best = ranks[size_t(i)] > ranks[size_t(best)] ? i : best;
    ranks[size_t(best)] = NEVER;
    out[n] = {best, scores[size_t(best)]};
    sum += out[n].share;
  }
  if (layer.renormalise) {
    for (int32_t n = 0; n < layer.chosen; ++n) out[n].share /= sum < 1e-12f ? 1e-12f : sum;
  }
  for (int32_t n = 0; n < layer.chosen; ++n) {
    out[n].share *= layer.scale;
    if (layer.expert_scales != nullptr) out[n].share *= layer.expert_scales[out[n].expert];
  }
  if (layer.shared == nullptr) return;
  const float share = layer.shared_gate ? 1.0f / (1.0f + exponential(splat(-outputs[count]))[0]) : 1.0f;
  out[layer.chosen] = {count, share};
}

void Visits::leave_groups(const ct_experts& layer) {
  const auto size = layer.count / layer.groups;
  const auto sum_of_best = [&](int32_t group) {
    std::copy_n(ranks.begin() + group * size, size, best.begin());
    std::partial_sort(best.begin(), best.begin() + layer.group_best, best.begin() + size, std::greater<float>());
    return std::accumulate(best.begin(), best.begin() + layer.group_best, 0.0f);
  };
  groups.clear();
  for (int32_t g = 0; g < layer.groups; ++g) groups.push_back({sum_of_best(g), g});
  const auto is_better = [](const auto& a, const auto& b) { return a.first > b.first; };
  std::stable_sort(groups.begin(), groups.end(), is_better);
  for (auto left = groups.begin() + layer.chosen_groups; left != groups.end(); ++left) {
    std::fill_n(ranks.begin() + left->second * size, size, NEVER);
  }
}

void Visits::arrange(const ct_experts& layer, const Choice* taken, int32_t rows) {
  const int32_t each = taken_by_a_row(layer), experts = visitors(layer);
  std::fill(counts.begin(), counts.end(), 0);
  for (int32_t i = 0; i < rows * each; ++i) ++counts[size_t(taken[i].expert)];
  all.clear();
  gatherings.clear();
  int32_t place = 0, first = 0;
  size_t inner = 0;
  for (int32_t e = 0; e < experts; ++e) {
    const int32_t here = counts[size_t(e)];
    if (here == 0) continue;
    const ct_feed* expert = e < layer.count ? layer.experts + e : layer.shared;
    const int32_t size = inner_of(*expert), wide = wide_of(here);
    for (int32_t r = 0; r < here; r += wide) {
      gatherings.push_back({int32_t(all.size()), r, here - r < wide ? here - r : wide});
    }
    all.push_back({expert, size, here, place, inner, first});
    counts[size_t(e)] = place;
    place += with_padding(here);
    inner += size_t(with_padding(here)) * size_t(size);
    first += size;
  }
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t n = 0; n < each; ++n, ++taken) {
      const auto at = size_t(counts[size_t(taken->expert)]++);
      row[at] = r;
      share[at] = taken->share;
    }
  }
}

MixtureRoom::MixtureRoom(const MixtureSizes& sizes, int32_t hidden, int32_t rows, bool has_plain)
    : gathered(sizes.places(rows), hidden),
      gated(sizes.places(rows), sizes.inner),
      plain(room<float>(size_t(has_plain ? sizes.places(rows) : 0) * size_t(hidden))),
      inner(room<float>(size_t(has_plain ? sizes.places(rows) : 0) * size_t(sizes.inner))),
      outputs(room<float>(size_t(rows) * size_t(sizes.outputs))),
      taken(size_t(rows) * size_t(sizes.taken)) {}

const char* misfit(const ct_experts& layer, const Sizes& sizes) {
  if (!fits(layer.router, sizes.hidden, layer.count + (layer.shared_gate != 0)) ||
      !(forms_of(layer.router) & FORM_FLOAT) || (layer.shared_gate && layer.shared == nullptr)) {
    return "the router does not fit the experts, or is quantised";
  }
  if (layer.groups < 1 || layer.count % layer.groups || layer.chosen_groups < 1 || layer.chosen_groups > layer.groups ||
      layer.group_best < 1 || layer.group_best > layer.count / layer.groups ||
      layer.chosen > layer.chosen_groups * (layer.count / layer.groups)) {
    return "so many experts cannot be chosen";
  }
  if (layer.shared != nullptr && !fits(*layer.shared, sizes)) return "the shared expert does not fit the others";
  return misfit_alone(layer, sizes);
}

const char* misfit_alone(const ct_experts& layer, const Sizes& sizes) {
  if (layer.count < 1 || layer.chosen < 1 || layer.chosen > layer.count) return "so many experts cannot be chosen";
  for (int32_t e = 0; e < layer.count; ++e) {
    if (!fits(layer.experts[e], sizes)) {
      return "the experts of a layer do not fit together, or have a type without kernels";
    }
  }
  return nullptr;
}

int32_t forms_of(const ct_experts& layer) {
  int32_t forms = layer.shared != nullptr ? forms_of(*layer.shared) : 0;
  for (int32_t e = 0; e < layer.count; ++e) forms |= forms_of(layer.experts[e]);
  return forms;
}

}  // namespace chatterm
