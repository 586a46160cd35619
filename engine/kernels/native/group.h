// Up to MOST_ROWS rows of several sequences through the whole model, by all threads of a pool.
//
// A barrier follows each part. One row has none before its products: what they read (a norm, attention put together)
// each thread computes and rounds for itself, and so the threads position the heads that they attend with.
//
//   qkv        norm, products                  x -> heads
//   attention  head norms, RoPE, KV write      heads -> heads, cache
//              attention                       heads -> mixed, or sums of parts
//   output     sums put together               sums -> mixed
//              products, residual              mixed -> x
//   gate_up    norm, products, activation,     x -> gated
//              rounding
//   down       products, residual              gated -> x
//
// A norm after a part takes one barrier more: products -> added, and then its rows, normed, -> x.
// Where there are experts, experts.h says what comes in place of the last two.
#pragma once

#include "decoder.h"

namespace chatterm {

constexpr int32_t SOME_ROWS = 8;  // rows of activations that a thread takes at once

class Group {
 public:
  // The rows are those that were added to `space.given` and `space.stretches`. Throws std::bad_alloc.
  Group(Decoder& decoder, float* logits);
  void run(int32_t thread);
  // What the experts of a layer give, where `space.mixture.taken` says which of them a row takes: row r of the group is
  // row rows[r] of a job.
  void run_mixture(const ct_layer& layer, const ct_mixture_job& job, const int32_t* rows, int32_t thread);

 private:
  float* x(int32_t r) const { return space.x.as<float>() + int64_t(r) * sizes.hidden; }
  float* heads(int32_t r) const { return space.heads.as<float>() + int64_t(r) * sizes.heads(); }
  float* added(int32_t r) const { return space.added.as<float>() + int64_t(r) * sizes.hidden; }
  float* mixed(int32_t r) const { return space.mixed.as<float>() + int64_t(r) * sizes.q_size; }
  uint8_t* cached(void* numbers, int32_t layer) const {
    return static_cast<uint8_t*>(numbers) + layer * decoder.cache.slots * decoder.slot_bytes;
  }
  // Where a thread begins with a layer: its memory is asked for ahead.
  const uint8_t* begin(const ct_linear& linear, int32_t outputs, int32_t grain, int32_t thread) const;

  // Calls part(n) for every n below `parts`; each is one thread's.
  template <typename Part>
  void claim(int32_t parts, Part part) const {
    for (int32_t n = decoder.pool.claim(); n < parts; n = decoder.pool.claim()) part(n);
  }
  // Calls part(first, end) for some rows at once until it was called for all, which read `columns` numbers at from(r)
  // each. The thread asks for what another one has in its cache.
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
  // out[r][i] = row r of the inputs times row i of a layer, or with `scale` is increased by so many times that.
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
  // What the visits that a thread knows of add to x; `one` is what all of them read where there is one row.
  void visit(const ct_layer& layer, const Inputs& one, int32_t thread, const uint8_t* later);
  void gather(const Visits& visits) const;
  void gate_up_visits(const Inputs& x, int32_t thread);
  void down_visits(const ct_layer& layer, int32_t thread, const uint8_t* later);
  Inputs visitors(const Visit& visit) const;
  Inputs gated(const Visit& visit) const;

  // Whether q and k are normed and rotated before they are attended with, not by who does.
  bool positions_first(const ct_layer& layer) const { return count > 1 || layer.attention.together; }
  Plan& plan_of(int32_t layer) const { return space.plans[decoder.plans[size_t(layer)]]; }
  void share_attention(Plan& plan);
  void add_tasks(Plan& plan, int32_t index, int32_t heads);
  void position(int32_t layer);
  void position_head(int32_t layer, int32_t r, int32_t which, float* out) const;
  void attention(int32_t layer, Bench& bench);
  void attend(int32_t layer, const Task& task, Bench& bench);
  void combine(const Queries& some, int32_t r, const Sums& sums, const float* sinks, int32_t kept_heads, int32_t heads,
               float* out) const;

  Decoder& decoder;
  Workspace& space;
  const Sizes& sizes;
  const int32_t count;  // of rows
  float* logits;
};

// All rows of the spans, so many at a time as are computed together. Throws std::bad_alloc.
void run_spans(Decoder& decoder, const Span* spans, int32_t count, float* logits);

}  // namespace chatterm
