// What a decoder keeps between its calls, for the decode step (step.cpp) and for chunks of a prompt (chunk.cpp).
#pragma once

#include <memory>
#include <vector>

#include "scratch.h"
#include "team.h"

namespace chatterm {

constexpr int32_t GRAIN = 16;          // outputs of a cache line, so that threads do not write to the same one
constexpr int32_t TASKS_A_THREAD = 4;  // of attention, that the threads finish together
constexpr int32_t ADD_ROWS = 256;      // outputs that are kept aside before they are added

inline int32_t forms_of(const ct_linear& linear) {
  int32_t forms = 0;
  for (int32_t p = 0; p < linear.count; ++p) forms |= form_of(linear.parts[p].type);
  return forms;
}

inline int32_t rows_of(const ct_linear& linear) {
  int32_t rows = 0;
  for (int32_t p = 0; p < linear.count; ++p) rows += linear.parts[p].rows;
  return rows;
}

// What one thread has for itself.
struct Bench {
  Buffer normed, query, scores, aside;
  Quantized quantized;

  Bench(int32_t widest, int32_t heads, int32_t q_heads, int32_t dim, int32_t inner)
      : normed(size_t(widest) * sizeof(float)),
        query(size_t(heads) * size_t(dim) * sizeof(float)),
        scores(size_t(q_heads) * ATTEND_ROWS * sizeof(float)),
        aside(size_t(inner > ADD_ROWS ? 2 * inner : 2 * ADD_ROWS) * sizeof(float)),
        quantized(widest) {}
};

struct Workspace;

struct Decoder {
  const ct_model model;
  const ct_cache cache;
  Pool& pool;
  const Kernels& kernels;
  std::vector<ct_layer> layers;
  std::vector<Bench> benches;
  const int32_t groups, q_size, kv_size, most_tasks, number_bytes;
  Buffer x, heads, inner;
  SumsRoom sums;  // of all query heads
  std::shared_ptr<Workspace> workspace;  // of chunks; null before the first one

  Decoder(const ct_model& given, const ct_cache& kv, Pool& team, const Kernels& chosen)
      : model(given),
        cache(kv),
        pool(team),
        kernels(chosen),
        layers(given.layers, given.layers + given.layer_count),
        groups(given.q_heads / given.kv_heads),
        q_size(given.q_heads * given.head_dim),
        kv_size(given.kv_heads * given.head_dim),
        most_tasks(TASKS_A_THREAD * team.size()),
        number_bytes(kv.type == CT_F32 ? 4 : 2),
        x(size_t(given.hidden) * sizeof(float)),
        heads(size_t(q_size + 2 * kv_size) * sizeof(float)),
        inner(size_t(given.inner) * sizeof(float)) {
    int32_t widest = given.hidden;
    for (int32_t size : {q_size, given.inner}) widest = size > widest ? size : widest;
    for (int32_t t = 0; t < team.size(); ++t) {
      benches.emplace_back(widest, given.q_heads + given.kv_heads, given.q_heads, given.head_dim, given.inner);
    }
  }
};

// Adds up the seconds since the last call to the parts of `times`, unless that is null.
class Clock {
 public:
  explicit Clock(ct_times* times);
  void add(double ct_times::* part);

 private:
  ct_times* times_;
  double before_;
};

// What is wrong with a block table for rows up to `last`, or null.
const char* misfit_of_table(const Decoder& decoder, const int32_t* table, int32_t blocks, int64_t last);

// Within a job of the pool: `thread`'s share of the logits that follow decoder.x, which must not be normed yet.
void compute_head(Decoder& decoder, int32_t thread, float* logits);

}  // namespace chatterm

struct ct_decoder : chatterm::Decoder {
  using Decoder::Decoder;
};
