// The feed-forward of a group with experts: see experts.h.
#include <algorithm>
#include <cstring>

#include "group.h"

namespace chatterm {

namespace {

constexpr int32_t ROUTED = 8;  // router outputs that a thread takes at once for one row
constexpr int32_t DOWN = 64;   // outputs of many rows that a thread takes at once, over all visits

// Returns the index of the visit, from number v on, that contains output `first`.
size_t visit_of(const std::vector<Visit>& visits, size_t v, int32_t first) {
  while (first >= visits[v].first + visits[v].size) ++v;
  return v;
}

}  // namespace

void Group::mix(const ct_layer& layer, float times, int32_t thread, const uint8_t* later) {
  const ct_experts& experts = *layer.experts;
  visit(layer, route(layer, thread), thread, later);
  const bool apart = has_norms_after(experts), has_sums = apart || layer.mlp_post_norm.weight != nullptr;
  if (apart) {
    claim_rows(count, sizes.hidden, [&](int32_t r) { return added(r); }, [&](int32_t r) {
      float *chosen = added(r), *shared = beside(r);
      if (experts.post_norm.weight != nullptr) {
        decoder.kernels.norm(chosen, experts.post_norm, sizes.hidden, chosen);
      }
      if (experts.shared == nullptr) return;
      if (experts.shared_post_norm.weight != nullptr) {
        decoder.kernels.norm(shared, experts.shared_post_norm, sizes.hidden, shared);
      }
      for (int32_t i = 0; i < sizes.hidden; ++i) chosen[i] += shared[i];
    });
    decoder.pool.barrier();
  }
  if (has_sums || times != 1.0f) {
    add_rows(has_sums ? added(0) : nullptr, layer.mlp_post_norm, layer.residual_scale, times);
  }
}

void Group::visit(const ct_layer& layer, const SingleRow& one, int32_t thread, const uint8_t* later) {
  if (count > 1) gather(*layer.experts, space.benches[size_t(thread)]);
  gate_up_visits(*layer.experts, one, thread);
  decoder.pool.barrier();
  down_visits(layer, thread, later);
  decoder.pool.barrier();
}

void Group::run_mixture(const ct_layer& layer, const ct_mixture_job& job, const int32_t* rows, int32_t thread) {
  const size_t hidden = size_t(sizes.hidden), row_bytes = hidden * (job.type == CT_F32 ? 4 : 2);
  Bench& bench = space.benches[size_t(thread)];
  float* normed = space.normed.as<float>();
  claim(count, [&](int32_t r) {
    dequantize_row(job.type, job.x + size_t(rows[r]) * row_bytes, sizes.hidden, normed + size_t(r) * hidden);
    std::fill(x(r), x(r) + hidden, 0.0f);
  });
  decoder.pool.barrier();
  SingleRow one{};
  if (count == 1) {
    one.chosen = bench.own.of(1, sizes.hidden);
    one.chosen.x = normed;
    decoder.kernels.round(normed, FORM_INT8 | FORM_HALVES, 0, 0, sizes.hidden, one.chosen);
  }
  bench.visits.arrange(*layer.experts, space.mixture.taken.data(), count);
  visit(layer, one, thread, bench.visits.all[0].expert->gate_up.parts[0].data);
  claim(count, [&](int32_t r) { std::memcpy(job.out + size_t(rows[r]) * hidden, x(r), hidden * sizeof(float)); });
}

// Makes the visits of this layer known to the thread. For a single row, returns the inputs that the visits read.
SingleRow Group::route(const ct_layer& layer, int32_t thread) {
  const ct_experts& experts = *layer.experts;
  const ct_linear& router = experts.router;
  const int32_t outputs = rows_of(router), each = taken_by_a_row(experts);
  Bench& bench = space.benches[size_t(thread)];
  float* found = space.mixture.outputs.as<float>();
  auto normed_by = [&](const ct_norm& norm, const float* row, float* spare) {
    if (norm.weight == nullptr) return row;
    decoder.kernels.norm(row, norm, sizes.hidden, spare);
    return static_cast<const float*>(spare);
  };
  if (count == 1) {
    const float* base = normed_by(layer.mlp_norm, x(0), bench.row.as<float>());
    // Room `n` for a normed row, and for its inputs of products.
    auto one_of = [&](const ct_norm& norm, int32_t n, int32_t forms) {
      Inputs one = bench.own.of(1, sizes.hidden, n * up_to(sizes.hidden, QUANTIZED));
      one.x = normed_by(norm, base, bench.rows.as<float>() + n * sizes.hidden);
      decoder.kernels.round(one.x, forms, 0, 0, sizes.hidden, one);
      return one;
    };
    const Inputs one = one_of(experts.router_norm, 0, forms_of(router));
    claim((outputs + ROUTED - 1) / ROUTED, [&](int32_t n) {
      const int32_t first = n * ROUTED, end = first + ROUTED < outputs ? first + ROUTED : outputs;
      bench.multiplier.multiply(router, first, end, one, found + first, ROUTED, row_of(router, first));
    });
    decoder.pool.barrier();
    bench.visits.choose(experts, found, bench.visits.own.data());
    bench.visits.arrange(experts, bench.visits.own.data(), 1);
    const Inputs chosen = one_of(experts.norm, 0, FORM_INT8 | FORM_HALVES);
    if (experts.norm.weight == nullptr && experts.shared_norm.weight == nullptr) return {chosen, chosen};
    return {chosen, one_of(experts.shared_norm, 1, FORM_INT8 | FORM_HALVES)};
  }
  Choice* taken = space.mixture.taken.data();
  float* rows = space.normed.as<float>();
  auto from = [&](int32_t r) { return x(r); };
  claim_some(count, sizes.hidden, from, [&](int32_t first, int32_t end) {
    Inputs some = space.shared.of(end - first, sizes.hidden, size_t(first) * size_t(sizes.hidden));
    const bool has_norm = experts.router_norm.weight != nullptr;
    some.x = has_norm ? bench.rows.as<float>() : rows + int64_t(first) * sizes.hidden;
    for (int32_t r = first; r < end; ++r) {
      float* row = rows + int64_t(r) * sizes.hidden;
      if (layer.mlp_norm.weight != nullptr) {
        decoder.kernels.norm(x(r), layer.mlp_norm, sizes.hidden, row);
      } else {
        std::memcpy(row, x(r), size_t(sizes.hidden) * sizeof(float));
      }
      const float* given = normed_by(experts.router_norm, row, bench.rows.as<float>() + (r - first) * sizes.hidden);
      decoder.kernels.round(given, forms_of(router), r - first, 0, sizes.hidden, some);
    }
    float* here = found + int64_t(first) * outputs;
    bench.multiplier.multiply(router, 0, outputs, some, here, outputs, row_of(router, 0));
    for (int32_t r = first; r < end; ++r, here += outputs) bench.visits.choose(experts, here, taken + int64_t(r) * each);
  });
  decoder.pool.barrier();
  bench.visits.arrange(experts, taken, count);
  return {};
}

void Group::gather(const ct_experts& layer, Bench& bench) const {
  const Visits& visits = bench.visits;
  claim(int32_t(visits.gatherings.size()), [&](int32_t n) {
    const Gathering& some = visits.gatherings[size_t(n)];
    const Visit& visit = visits.all[size_t(some.visit)];
    const int32_t forms = forms_of(visit.expert->gate_up);
    const Inputs out = visitors(visit);
    const ct_norm& norm = visit.expert == layer.shared ? layer.shared_norm : layer.norm;
    for (int32_t i = some.first; i < some.first + some.count; ++i) {
      const float* row = space.normed.as<float>() + int64_t(visits.row[size_t(visit.place + i)]) * sizes.hidden;
      if (norm.weight != nullptr) {
        decoder.kernels.norm(row, norm, sizes.hidden, bench.row.as<float>());
        row = bench.row.as<float>();
      }
      float* plain = const_cast<float*>(out.x) + int64_t(i) * sizes.hidden;
      if (forms & FORM_FLOAT) std::memcpy(plain, row, size_t(sizes.hidden) * sizeof(float));
      decoder.kernels.round(row, forms, i, 0, sizes.hidden, out);
    }
  });
  decoder.pool.barrier();
}

Inputs Group::visitors(const Visit& visit) const {
  const size_t first = size_t(visit.place) * size_t(sizes.hidden);
  Inputs found = space.mixture.gathered.of(visit.rows, sizes.hidden, first);
  found.x = space.mixture.plain.as<float>() + first;
  return found;
}

Inputs Group::gated(const Visit& visit) const {
  Inputs found = space.mixture.gated.of(visit.rows, visit.size, visit.inner);
  found.x = space.mixture.inner.as<float>() + visit.inner;
  return found;
}

void Group::gate_up_visits(const ct_experts& layer, const SingleRow& one, int32_t thread) {
  Bench& bench = space.benches[size_t(thread)];
  const std::vector<Visit>& visits = bench.visits.all;
  const uint8_t* later = begin(visits[0].expert->down, sizes.hidden, GRAIN, thread);
  Deal deal(decoder.pool, thread, bench.visits.outputs(), QUANTIZED, few(count));
  size_t v = 0;
  for (int32_t first, end, after; deal.next(first, end, after);) {
    for (v = visit_of(visits, v, first); first < end; ++v) {
      const Visit& visit = visits[v];
      const ct_feed& expert = *visit.expert;
      const int32_t stop = end < visit.first + visit.size ? end : visit.first + visit.size;
      const int32_t then = stop < end ? stop : after;
      const uint8_t* next = later;
      if (then >= 0) {
        const Visit& other = visits[visit_of(visits, v, then)];
        next = row_of(other.expert->gate_up, then - other.first);
      }
      const Inputs given = count > 1                         ? visitors(visit)
                           : visit.expert == layer.shared ? one.shared
                                                          : one.chosen;
      gate_some(expert, first - visit.first, stop - visit.first, given, gated(visit), next, bench);
      first = stop;
    }
    --v;
  }
}

// Every output belongs to one thread, which adds the results of the visits in order.
void Group::down_visits(const ct_layer& layer, int32_t thread, const uint8_t* later) {
  const bool apart = has_norms_after(*layer.experts), has_sums = apart || layer.mlp_post_norm.weight != nullptr;
  const float scale = has_sums ? 1.0f : layer.residual_scale;
  Bench& bench = space.benches[size_t(thread)];
  const std::vector<Visit>& visits = bench.visits.all;
  float* tile = bench.tile.as<float>();
  Deal deal(decoder.pool, thread, sizes.hidden, few(count) ? GRAIN : DOWN, few(count));
  for (int32_t first, end, after; deal.next(first, end, after);) {
    for (int32_t r = 0; has_sums && r < count; ++r) {
      std::fill(added(r) + first, added(r) + end, 0.0f);
      if (apart) std::fill(beside(r) + first, beside(r) + end, 0.0f);
    }
    for (size_t v = 0; v < visits.size(); ++v) {
      const Visit& visit = visits[v];
      const ct_linear& down = visit.expert->down;
      const Inputs given = gated(visit);
      const int32_t piece = piece_of(visit.rows);
      const uint8_t* then = v + 1 < visits.size() ? row_of(visits[v + 1].expert->down, first)
                            : after < 0           ? later
                                                  : row_of(visits[0].expert->down, after);
      for (int32_t from = first; from < end; from += piece) {
        const int32_t to = from + piece < end ? from + piece : end;
        bench.multiplier.multiply(down, from, to, given, tile, piece, to < end ? row_of(down, to) : then);
        for (int32_t i = 0; i < visit.rows; ++i) {
          const int32_t r = bench.visits.row[size_t(visit.place + i)];
          const bool is_shared = visit.expert == layer.experts->shared;
          float* out = (apart && is_shared ? beside(r) : has_sums ? added(r) : x(r)) + from;
          const float* found = tile + i * piece;
          const float share = scale * bench.visits.share[size_t(visit.place + i)];
          for (int32_t k = 0; k < to - from; ++k) out[k] += share * found[k];
        }
      }
    }
  }
}

}  // namespace chatterm
