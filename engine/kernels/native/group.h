// Up to MOST_ROWS rows of several sequences through the whole model, by all threads of a pool.
//
// A barrier follows each part. A single row has none before its products: each thread computes and rounds their inputs
// (a norm, combined attention) for itself, and positions the heads that it attends with.
//
//   qkv        norm, products                  x -> heads
//   (a short convolution or a recurrence takes the place of the next part: see convolution.cpp and recurrence.cpp; for
//   latents see latent.cpp)
//   attention  head norms, RoPE, KV write      heads -> heads, cache
//              attention                       heads -> mixed, or sums of parts
//   output     combination of sums             sums -> mixed
//              products, residual              mixed -> x
//   gate_up    norm, products, activation,     x -> gated
//              rounding
//   down       products, residual              gated -> x
//   input      products, activation            x, inputs -> mixed (only if layers have inputs of their own)
//              products, residual              mixed -> x
//
// A norm after a part takes one more barrier: products -> added, and then its rows, normed, -> x. With experts, the
// steps in experts.h replace the last two.
#pragma once

#include "decoder.h"

namespace chatterm {

// The inputs of the experts for a single row: those of the chosen ones, and of the shared one.
struct SingleRow {
  Inputs chosen, shared;
};

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
  // The inputs of a layer's attention or convolution, and its outputs.
  float* heads(int32_t layer, int32_t r) const {
    return space.heads.as<float>() + int64_t(r) * shape_at(layer).projected;
  }
  float* mixed(int32_t layer, int32_t r) const {
    return space.mixed.as<float>() + int64_t(r) * shape_at(layer).mixed;
  }
  // The queries that attend.
  float* query_heads(int32_t layer, int32_t r) const {
    const Shape& shape = shape_at(layer);
    return shape.queries == 0 ? heads(layer, r) : space.queries.as<float>() + int64_t(r) * shape.q_size;
  }
  float* added(int32_t r) const { return space.added.as<float>() + int64_t(r) * sizes.hidden; }
  float* beside(int32_t r) const { return space.beside.as<float>() + int64_t(r) * sizes.hidden; }
  const ct_layer& layer_at(int32_t index) const { return decoder.layers[size_t(index)]; }
  // The slot in which a layer keeps row r of the group.
  int64_t slot_at(int32_t layer, int32_t r) const {
    const Row& row = space.given[size_t(r)];
    return decoder.slot_at(layer_at(layer), row.tables, row.row);
  }
  const Shape& shape_at(int32_t index) const { return decoder.shapes[size_t(index)]; }
  // Return where a thread begins with a product, a feed-forward or a layer, so that its memory can be prefetched.
  const uint8_t* begin(const ct_linear& linear, int32_t outputs, int32_t grain, int32_t thread) const;
  const uint8_t* begin_feed(const ct_layer& layer, int32_t thread) const;
  const uint8_t* begin_layer(const ct_layer& layer, int32_t thread) const;

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
  // Prepares the inputs of a product with `rows` rows. make(r, spare) returns row r, in `spare` or where it already lies,
  // and may read from(r). Plain weights read all rows from `plain` on.
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
  // x += scale * norm(the product), then x *= times.
  void add(const ct_linear& linear, const Inputs& given, const uint8_t* later, const ct_norm& norm, float scale,
           float times, int32_t thread);
  // x += scale * norm(rows), if there are rows, [count, hidden]; then x *= times.
  void add_rows(float* rows, const ct_norm& norm, float scale, float times);
  void cap_logits();
  // Does what `add` does, with the first part of a layer. What is added beside another part is put aside.
  void run_mixer(int32_t layer, const uint8_t* later, float times, int32_t thread);
  // Whether the result of a layer's first part is added later, because another part reads x as this one got it.
  bool is_put_aside(int32_t layer) const;

  // Computes the inputs of all layers.
  void make_inputs(int32_t thread);
  void add_input(int32_t layer, const uint8_t* later, int32_t thread);

  // Does what `add` does, with the experts.
  void mix(const ct_layer& layer, float times, int32_t thread, const uint8_t* later);
  SingleRow route(const ct_layer& layer, int32_t thread);
  // Adds the results of the visits that a thread has arranged to x; a single row has the inputs `one`.
  void visit(const ct_layer& layer, const SingleRow& one, int32_t thread, const uint8_t* later);
  void gather(const ct_experts& layer, Bench& bench) const;
  void gate_up_visits(const ct_experts& layer, const SingleRow& one, int32_t thread);
  void down_visits(const ct_layer& layer, int32_t thread, const uint8_t* later);
  Inputs visitors(const Visit& visit) const;
  Inputs gated(const Visit& visit) const;

  // Whether q and k are normed and rotated for all threads before the attention, instead of by the threads that attend.
  bool positions_first(const ct_layer& layer) const {
    return count > 1 || layer.attention.together || layer.latent.kv_rank > 0;
  }
  Plan& plan_of(int32_t layer) const { return space.plans[decoder.plans[size_t(layer)]]; }
  // Writes the inputs of a convolution into the cache, then returns what it makes of each row.
  Inputs convolve(int32_t layer, int32_t forms, Bench& bench);
  // Computes a recurrence: writes the log and states, and returns what its last product multiplies.
  Inputs recur(int32_t layer, int32_t forms, Bench& bench);
  // Walks through a head of a stretch; `next` is the state that the thread reads next, or null.
  void walk_head(int32_t layer, const Stretch& stretch, const StateMoves& moves, int32_t head, const float* next,
                 Bench& bench) const;
  // Walks over rows first..end of a sequence, at most WALKED, from one state to another.
  void walk_rows(int32_t layer, const Stretch& stretch, int32_t head, int32_t first, int32_t end, HeadWalk& walk,
                 const WalkRoom& room) const;
  // Norms y of a head of a delta net and multiplies it by silu(z), as the last product reads it.
  void finish_head(int32_t layer, int32_t head, int32_t r, const float* y) const;
  // Norms y of all heads of Mamba-2 and multiplies it by silu(z); `out` may be where y is.
  void gate_heads(int32_t layer, int32_t r, float* out) const;
  // Returns the state of a head of a layer in a slot; zeros for slot -1.
  float* state_at(int32_t layer, int32_t slot, int32_t head) const;
  // Writes what a head reads of the log rows first..end of a sequence to `out`, one row after the other; zeros before
  // its first.
  void read_log(int32_t layer, const Stretch& stretch, int32_t first, int32_t end, const HeadPieces& head,
                uint8_t* out) const;
  void write_log(int32_t layer, int32_t r) const;
  // Computes latent attention, and returns its values.
  Inputs attend_to_latents(int32_t layer, int32_t forms, int32_t thread);
  void keep_latents(int32_t layer, Bench& bench);
  // Returns the queries [rows][q heads][nope + rope], and in `stride` their numbers from row to row.
  const float* unabsorbed(int32_t layer, int32_t thread, int32_t& stride);
  // Multiplies each head by its own part of a layer, whose outputs are those of all heads. give(r, head, first, out)
  // writes the inputs for the outputs from `first` on of row r and a head to `out`; take(r, head) returns where the
  // outputs of a head go.
  template <typename Give, typename Take>
  void multiply_heads(const ct_linear& linear, int32_t heads, Bench& bench, Give give, Take take);
  void share_attention(Plan& plan);
  void add_tasks(Plan& plan, int32_t index, int32_t heads);
  // Norms and rotates q and k in place, and writes K and V.
  void position(int32_t layer, Bench& bench);
  void position_head(int32_t layer, int32_t r, int32_t which, float* out) const;
  // Returns the values of some KV heads of a row, whose k is not positioned yet; in `spare` if they are normed.
  const float* values(int32_t layer, int32_t r, int32_t head, int32_t count, float* spare) const;
  void attention(int32_t layer, Bench& bench);
  CachedRows cached_rows(int32_t layer, const Queries& some, int32_t head, int32_t part) const;
  // Also prefetches the first rows of the task `next`, if there is one.
  void attend(int32_t layer, const Task& task, const Task* next, Bench& bench);
  void combine(int32_t layer, const Queries& some, int32_t r, const Sums& sums, const float* sinks, int32_t kept_heads,
               int32_t heads, float* out) const;

  Decoder& decoder;
  Workspace& space;
  const Sizes& sizes;
  const int32_t count;  // of rows
  float* logits;
};

template <typename From, typename Make>
Inputs Group::inputs(int32_t rows, int32_t columns, int32_t forms, float* plain, Bench& bench, From from, Make make) {
  if (rows == 1) {
    Inputs one = bench.own.of(1, columns);
    one.x = make(0, bench.row.as<float>());
    decoder.kernels.round(one.x, forms, 0, 0, columns, one);
    return one;
  }
  Inputs all = space.shared.of(rows, columns);
  all.x = plain;
  claim_rows(rows, columns, from, [&](int32_t r) {
    const float* row = make(r, forms & FORM_FLOAT ? plain + int64_t(r) * columns : bench.row.as<float>());
    decoder.kernels.round(row, forms, r, 0, columns, all);
  });
  decoder.pool.barrier();
  return all;
}

// Computes all rows of the spans, as many at a time as are computed together. Throws std::bad_alloc.
void run_spans(Decoder& decoder, const Span* spans, int32_t count, float* logits);

}  // namespace chatterm
