// Up to MOST_ROWS rows of several sequences through the whole model, by all threads of a pool.
//
// A barrier follows each part. A single row has none before its products: each thread computes and rounds their inputs
// (a norm, combined attention) for itself, and positions the heads that it attends with.
//
//   qkv        norm, products                  x -> heads
//   attention  head norms, RoPE, KV write      heads -> heads, cache
//              attention                       heads -> mixed, or sums of parts
//   output     combination of sums             sums -> mixed
//              products, residual              mixed -> x
//   gate_up    norm, products, activation,     x -> gated
//              rounding
//   down       products, residual              gated -> x
//
// A norm after a part takes one more barrier: products -> added, and then its rows, normed, -> x. With experts, the
// steps in experts.h replace the last two.
#pragma once

#include "decoder.h"

namespace chatterm {

constexpr int32_t SOME_ROWS = 8;  // rows of activations that a thread takes at once

class Group {
 public:
  // Takes the rows in `space.given` and `space.stretches`. Throws std::bad_alloc.
  Group(Decoder& decoder, float* logits);
  void run(int32_t thread);
  // Computes the experts of a layer for a job; `space.mixture.taken` has the choices of each row. Row r of the group is
  // row rows[r] of the job.
  void run_mixture(const ct_layer& layer, const ct_mixture_job& job, const int32_t* rows, int32_t thread);

 private:
  float* x(int32_t r) const { return space.x.as<float>() + int64_t(r) * sizes.hidden; }
  float* heads(int32_t r) const { return space.heads.as<float>() + int64_t(r) * sizes.heads(); }
  float* added(int32_t r) const { return space.added.as<float>() + int64_t(r) * sizes.hidden; }
  float* mixed(int32_t r) const { return space.mixed.as<float>() + int64_t(r) * sizes.q_size; }
  uint8_t* cached(void* numbers, int32_t layer) const {
    return static_cast<uint8_t*>(numbers) + layer * decoder.cache.slots * decoder.slot_bytes;
  }
  // Returns where a thread begins with a layer, so that its memory can be prefetched.
  const uint8_t* begin(const ct_linear& linear, int32_t outputs, int32_t grain, int32_t thread) const;

  // Calls part(n) once for every n below `parts`, in any thread.
  template <typename Part>
  void claim(int32_t parts, Part part) const {
    for (int32_t n = decoder.pool.claim(); n < parts; n = decoder.pool.claim()) part(n);
  }
  // Calls part(first, end) for a few rows at a time, until all are done. Each row reads `columns` numbers at from(r),
  // which the thread prefetches, because they may be in another core's cache.
  template <typename From, typename Part>
  void claim_some(int32_t rows, int32_t columns, From from, Part part) const {
    const int32_t fair = rows / (4 * decoder.pool.working());
    const int32_t some = fair < 1 ? 1 : fair < SOME_ROWS ? fair : SOME_ROWS;
    claim((rows + some - 1) / some, [&](int32_t n) {
      const int32_t first = n * some, end = first + some < rows ? first + some : rows;
      for (int32_t r = first; r < end; ++r) {
        const float* numbers = from(r);
        for (int32_t i = 0; i < columns; i += 16) __builtin_prefetch(numbers + i);
      }
      part(first, end);
    });
  }
  // Calls part(r) for every row.
  template <typename From, typename Part>
  void claim_rows(int32_t rows, int32_t columns, From from, Part part) const {
    claim_some(rows, columns, from, [&](int32_t first, int32_t end) {
      for (int32_t r = first; r < end; ++r) part(r);
    });
  }
  template <typename From, typename Make>
  Inputs inputs(int32_t rows, int32_t columns, int32_t forms, float* plain, Bench& bench, From from, Make make);

  void embed(int32_t r, float* spare) const;
  Inputs normed(const ct_norm& norm, int32_t forms, const std::vector<int32_t>* some, Bench& bench);
  Inputs put_together(int32_t layer, int32_t forms, Bench& bench);
  Inputs gate_up(const ct_feed& feed, const Inputs& x, int32_t thread);
  void gate_some(const ct_feed& feed, int32_t first, int32_t end, const Inputs& x, const Inputs& out,
                 const uint8_t* later, Bench& bench) const;
  // out[r][i] = row r of the inputs times row i of a layer; with `scale`, out is increased by `scale` times that.
  void multiply(const ct_linear& linear, const Inputs& x, const uint8_t* later, float* out, float scale,
                int32_t thread);
  // x += scale * norm(the product).
  void add(const ct_linear& linear, const Inputs& given, const uint8_t* later, const ct_norm& norm, float scale,
           int32_t thread);
  // x += scale * norm(added), row by row.
  void add_normed(const ct_norm& norm, float scale);
  void cap_logits();

  void mix(const ct_layer& layer, int32_t thread, const uint8_t* later);
  Inputs route(const ct_layer& layer, int32_t thread);
  // Adds the results of the visits that a thread has arranged to x; `one` is the input of all of them for a single row.
  void visit(const ct_layer& layer, const Inputs& one, int32_t thread, const uint8_t* later);
  void gather(const Visits& visits) const;
  void gate_up_visits(const Inputs& x, int32_t thread);
  void down_visits(const ct_layer& layer, int32_t thread, const uint8_t* later);
  Inputs visitors(const Visit& visit) const;
  Inputs gated(const Visit& visit) const;

  // Whether q and k are normed and rotated for all threads before the attention, instead of by the threads that attend.
  bool positions_first(const ct_layer& layer) const { return count > 1 || layer.attention.together; }
  Plan& plan_of(int32_t layer) const { return space.plans[decoder.plans[size_t(layer)]]; }
  void share_attention(Plan& plan);
  void add_tasks(Plan& plan, int32_t index, int32_t heads);
  void position(int32_t layer);
  void position_head(int32_t layer, int32_t r, int32_t which, float* out) const;
  void attention(int32_t layer, Bench& bench);
  CachedRows cached_rows(int32_t layer, const Queries& some, int32_t head, int32_t part) const;
  // Also prefetches the first rows of the task `next`, if there is one.
  void attend(int32_t layer, const Task& task, const Task* next, Bench& bench);
  void combine(const Queries& some, int32_t r, const Sums& sums, const float* sinks, int32_t kept_heads, int32_t heads,
               float* out) const;

  Decoder& decoder;
  Workspace& space;
  const Sizes& sizes;
  const int32_t count;  // of rows
  float* logits;
};

// Computes all rows of the spans, as many at a time as are computed together. Throws std::bad_alloc.
void run_spans(Decoder& decoder, const Span* spans, int32_t count, float* logits);

}  // namespace chatterm
