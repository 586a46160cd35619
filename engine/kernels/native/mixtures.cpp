// Mixtures by themselves, for a network that is otherwise computed elsewhere: by a GPU without room for them.
#include <cmath>
#include <memory>
#include <new>

#include "group.h"

using namespace chatterm;

struct ct_mixtures {
  // The routers and the shared experts are computed elsewhere.
  ct_mixtures(const ct_experts* given, int32_t count, int32_t hidden) : experts(given, given + count), hidden(hidden) {
    for (ct_experts& layer : experts) {
      layer.router = {};
      layer.shared = nullptr;
      ct_layer whole{};
      whole.experts = &layer;
      whole.residual_scale = whole.scalar = 1.0f;
      layers.push_back(whole);
    }
    rows.reserve(MOST_ROWS_OF_EXPERTS);
  }

  // A model whose layers have experts alone.
  ct_model model() const {
    ct_model found{};
    found.layers = layers.data();
    found.layer_count = int32_t(layers.size());
    found.hidden = hidden;
    found.positions = 1;
    return found;
  }

  std::vector<ct_experts> experts;
  std::vector<ct_layer> layers;
  const int32_t hidden;
  std::unique_ptr<Decoder> decoder;
  std::vector<int32_t> rows;  // of the job: those that are computed together
};

namespace {

struct Call {
  Group& group;
  const ct_layer& layer;
  const ct_mixture_job& job;
};

void run_call(void* given, int32_t thread) {
  const Call& call = *static_cast<Call*>(given);
  call.group.run_mixture(call.layer, call.job, call.job.mixtures->rows.data(), thread);
}

void fill(const ct_mixture_job& job, int32_t row, float value) {
  float* out = job.out + int64_t(row) * job.mixtures->hidden;
  std::fill(out, out + job.mixtures->hidden, value);
}

// Reads the experts of row `row`. If it has none, or an invalid id, fills its output and returns false.
bool take(const ct_mixture_job& job, const ct_experts& layer, int32_t row, Choice* out) {
  const int64_t first = int64_t(row) * layer.chosen;
  for (int32_t n = 0; n < layer.chosen; ++n) {
    const int32_t id = job.ids[first + n];
    if (id < 0 || id >= layer.count) {
      fill(job, row, n == 0 && id == -1 ? 0.0f : NAN);
      return false;
    }
    out[n] = {id, job.shares[first + n]};
  }
  return true;
}

}  // namespace

ct_mixtures* ct_mixtures_create(const ct_experts* layers, int32_t count, int32_t hidden, ct_pool* pool, int32_t variant,
                                const char** problem) {
  const Kernels* kernels = kernels_of(variant);
  *problem = kernels == nullptr            ? "this machine does not run that variant"
             : count < 1 || hidden < 1 ? "the sizes of the model are impossible"
                                           : nullptr;
  if (*problem != nullptr) return nullptr;
  try {
    auto found = std::make_unique<ct_mixtures>(layers, count, hidden);
    const ct_model model = found->model();
    const Sizes sizes(model);
    for (const ct_experts& layer : found->experts) {
      if ((*problem = misfit_alone(layer, sizes)) != nullptr) return nullptr;
    }
    const ct_cache empty{CT_F32, 1, 1, 0};  // one block table, which nobody reads
    found->decoder = std::make_unique<Decoder>(model, empty, pool->pool, *kernels);
    found->decoder->reserve(MOST_ROWS_OF_EXPERTS);
    return found.release();
  } catch (const std::bad_alloc&) {
    *problem = "memory is short";
    return nullptr;
  }
}

void ct_mixtures_destroy(ct_mixtures* mixtures) { delete mixtures; }

void ct_mixtures_run(const ct_mixture_job* job) {
  ct_mixtures& all = *job->mixtures;
  Decoder& decoder = *all.decoder;
  Workspace& space = *decoder.space;
  const ct_layer& layer = decoder.layers[size_t(job->layer)];
  const int32_t chosen = layer.experts->chosen;
  int32_t row = 0;
  while (row < job->rows) {
    const int32_t first = row;
    all.rows.clear();
    for (; row < job->rows && int32_t(all.rows.size()) < MOST_ROWS_OF_EXPERTS; ++row) {
      Choice* taken = space.mixture.taken.data() + int64_t(all.rows.size()) * chosen;
      if (take(*job, *layer.experts, row, taken)) all.rows.push_back(row);
    }
    if (all.rows.empty()) continue;
    try {
      space.given.assign(all.rows.size(), Row{});
      Group group(decoder, nullptr);
      Call call{group, layer, *job};
      decoder.pool.run(run_call, &call);
    } catch (const std::bad_alloc&) {
      for (int32_t r = first; r < row; ++r) fill(*job, r, NAN);
    }
  }
}
