// The state that a decoder keeps between its calls.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "experts.h"
#include "interleave.h"
#include "multiply.h"
#include "recurrence.h"
#include "team.h"

namespace chatterm {

constexpr int32_t MOST_ROWS = 128;             // with more, unpacking costs no less per row, and the rows leave the cache
constexpr int32_t MOST_ROWS_OF_EXPERTS = 512;  // because only some of the rows read each expert
constexpr int32_t MOST_QUERIES = 32;           // rows whose queries read K and V together
constexpr int32_t MOST_SUMS = 1 << 17;         // numbers of the sums of such rows
constexpr int32_t TASKS_A_THREAD = 4;          // tasks of attention per thread
constexpr int32_t SOME_ROWS = 8;               // rows of activations that a thread takes at once
constexpr int32_t QUANTIZED = 32;              // numbers that are rounded to int8 together

inline int32_t inner_of(const ct_feed& feed) { return feed.down.parts[0].columns; }

// Whether a layer has a first part, and a second one.
inline bool has_mixer(const ct_layer& layer) { return layer.qkv.count > 0; }
inline bool has_feed(const ct_layer& layer) { return layer.experts != nullptr || layer.feed.down.count > 0; }

// Latents are attended to by this many queries of a row together at most, so that several threads share those of one row.
constexpr int32_t MOST_OF_LATENT = 10;

// The number of inputs of q_b, 0 if there is none.
inline int32_t q_rank_in(const ct_latent& latent) { return latent.q_b.count > 0 ? latent.q_b.parts[0].columns : 0; }

// How many query heads attend to a KV head together.
inline int32_t queries_together(const ct_layer& layer) {
  const ct_attention& how = layer.attention;
  if (how.kv_heads == 0) return 0;
  if (layer.latent.kv_rank == 0) return how.q_heads / how.kv_heads;
  int32_t groups = how.q_heads < MOST_OF_LATENT ? how.q_heads : MOST_OF_LATENT;
  while (how.q_heads % groups != 0) --groups;
  return groups;
}

// The sizes of a layer's attention, all zeros if it has none, and of the inputs and outputs of its first part.
// The heads that share latents are divided into several KV heads, which are the same rows.
struct Shape {
  int32_t q_heads, groups, kv_heads, dim, q_size, kv_size;
  int32_t v_dim;  // the numbers of V in a head
  int32_t projected, mixed, out;
  int32_t gate = 0, gates = 0;  // the numbers of a head's gate, and where those of all heads begin
  int32_t queries = 0;  // the numbers of all queries that attend to latents

  explicit Shape(const ct_layer& layer)
      : q_heads(layer.attention.q_heads),
        groups(queries_together(layer)),
        kv_heads(groups > 0 ? q_heads / groups : 0),
        dim(layer.attention.head_dim),
        q_size(q_heads * dim),
        kv_size(layer.attention.kv_heads * dim),
        v_dim(dim),
        projected(3 * layer.convolution.size),
        mixed(layer.convolution.size),
        out(mixed) {
    if (layer.recurrence.width > 0) take(RecurrenceShape(layer.recurrence));
    if (kv_heads == 0) return;
    gates = q_size + (layer.attention.shares_kv ? 0 : layer.attention.v_is_k ? kv_size : 2 * kv_size);
    gate = layer.attention.gate;
    projected = gates + q_heads * gate;
    mixed = out = q_size;
    if (layer.latent.kv_rank > 0) take(layer.latent);
  }

  // The most rows whose queries read K and V together: their sums take memory for each part of the context.
  int32_t together() const {
    const int32_t most = MOST_SUMS / (groups * v_dim);
    return most < 1 ? 1 : most < MOST_QUERIES ? most : MOST_QUERIES;
  }

 private:
  void take(const RecurrenceShape& recurrence) {
    projected = recurrence.projected();
    mixed = out = recurrence.out;
  }
  void take(const ct_latent& latent) {
    const int32_t given = q_heads * (latent.nope + latent.rope), q_rank = q_rank_in(latent);
    v_dim = latent.kv_rank;
    projected = (q_rank > 0 ? q_rank : given) + dim;
    mixed = std::max(given, q_heads * v_dim);
    out = q_heads * latent.values;
    queries = std::max(q_size, q_rank);
  }
};

// The sizes that memory depends on: the largest of all layers, and their inputs together.
struct Sizes {
  int32_t hidden, inputs, inner = 0, projected, mixed, queries = 0, dim = 0;
  int32_t q_heads = 0, groups = 0;     // of a row, and of one KV head
  int32_t of_heads = 0, of_group = 0;  // the numbers in a row's q, k and v, and in the query heads of one KV head
  int32_t of_latent = 0;               // the inputs of k_b and v_b for a head
  WalkSizes walks;

  explicit Sizes(const ct_model& model)
      : hidden(model.hidden),
        inputs(model.layer_count * model.inputs.size),
        projected(inputs),
        mixed(model.inputs.size) {
    for (int32_t i = 0; i < model.layer_count; ++i) {
      const Shape shape(model.layers[i]);
      if (model.layers[i].recurrence.width > 0) walks.grow(model.layers[i].recurrence);
      projected = std::max(projected, std::max(shape.projected, shape.out));
      mixed = std::max(mixed, shape.mixed);
      queries = std::max(queries, shape.queries);
      of_latent = std::max(of_latent, std::max(model.layers[i].latent.nope, model.layers[i].latent.kv_rank));
      dim = std::max(dim, shape.dim);
      q_heads = std::max(q_heads, shape.q_heads);
      of_heads = std::max(of_heads, shape.q_size + 2 * shape.kv_size);
      groups = std::max(groups, shape.groups);
      of_group = std::max(of_group, shape.groups * shape.dim);
      const ct_experts* experts = model.layers[i].experts;
      inner = std::max(inner, inner_of(model.layers[i].feed));
      for (int32_t e = 0; experts != nullptr && e < experts->count; ++e) {
        inner = std::max(inner, inner_of(experts->experts[e]));
      }
      if (experts != nullptr && experts->shared != nullptr) inner = std::max(inner, inner_of(*experts->shared));
    }
  }
  int32_t widest() const { return std::max(std::max(hidden, inner), std::max(mixed, queries)); }
};

// Scratch memory of one thread, for up to `rows` rows computed together.
struct Bench {
  InputsRoom own;      // for one row, and once more for that of a shared expert
  InputsRoom of_head;  // for the rows of one head that attends to latents
  Buffer row, rows, tile, other, query, scores, keys, values, numbers;
  SumsRoom sums;
  WalkRoom walk;
  Multiplier multiplier;
  Visits visits;

  Bench(const Kernels& kernels, const Sizes& sizes, const MixtureSizes& mixture, int32_t rows)
      : own(mixture.taken ? 2 : 1, sizes.widest()),
        of_head(sizes.of_latent > 0 ? rows : 0, sizes.of_latent),
        row(room<float>(size_t(sizes.widest()))),
        rows(room<float>(mixture.taken ? SOME_ROWS * size_t(sizes.hidden) : 0)),
        tile(room<float>(tile_of(rows))),
        other(room<float>(tile_of(rows))),
        query(room<float>(std::max(size_t(sizes.of_heads), together(rows) * size_t(sizes.of_group)))),
        scores(room<float>(std::max(size_t(sizes.q_heads), together(rows) * size_t(sizes.groups)) * ATTEND_ROWS)),
        keys(room<float>(size_t(sizes.dim) * ATTEND_ROWS)),
        values(room<float>(size_t(padded(sizes.dim)) * ATTEND_ROWS)),
        numbers(room<float>(size_t(rows) * size_t(sizes.of_latent))),
        walk(sizes.walks),
        multiplier(kernels, sizes.widest(), rows),
        visits(mixture, rows) {}

 private:
  static size_t tile_of(int32_t rows) { return few(rows) ? PIECE : up_to(rows, TILE) * QUANTIZED; }
  // Rows whose queries read one KV head together; a row by itself reads all heads.
  static size_t together(int32_t rows) { return size_t(rows < MOST_QUERIES ? rows : MOST_QUERIES); }
};

// The block tables of a sequence, one after the other.
struct Tables {
  const int32_t* first;
  int32_t blocks;

  const int32_t* at(int32_t number) const { return first + int64_t(number) * blocks; }
};

// A span of one sequence, as given to `ct_decoder_run`.
struct Span {
  Tables tables;
  const int32_t* tokens;
  const int32_t* positions;
  int32_t row;
  int32_t count;
  int32_t wanted;
  StateMoves states;
};

// A row of activations, described by its token and its place in its sequence.
struct Row {
  int32_t token;
  int32_t position;
  Tables tables;
  int32_t row;
};

// Adjacent rows of one sequence.
struct Stretch {
  Tables tables;
  int32_t row;    // of the first one in the sequence
  int32_t first;  // of the first one in the group
  int32_t count;
};

// Rows whose queries read K and V together, and the parts of the context that they see, of PART_ROWS each.
struct Queries : Stretch {
  int32_t part, end;
  bool apart;   // whether each part is a task of its own, with sums that are combined afterwards
  size_t sums;  // where these sums are: [parts][kv_heads][count][groups]

  int32_t parts() const { return end - part; }
};

// The attention that a thread computes at once: some KV heads of one row, or one of several rows, over parts of the
// context.
struct Task {
  int32_t queries;
  int32_t head, heads;
  int32_t part, end;
};

// How the rows of a group attend in all layers with the same window and heads.
struct Plan {
  int32_t layer;  // the first of them
  std::vector<Queries> queries;
  std::vector<Task> tasks;
  std::vector<int32_t> of_row;  // the index in `queries` of each row
};

// Memory for up to `rows` rows computed together, and their inputs.
struct Workspace {
  int32_t rows;
  // fp32 [rows][...]: `normed` and `inner` are for plain weights, `added` for outputs that are normed before they are
  // added to x, and `beside` for those of a part beside another one. `heads` and `mixed` are the inputs and outputs of
  // a layer's first part, `inputs` those of all layers, and `queries` those that attend to latents.
  Buffer x, inputs, heads, mixed, queries, normed, inner, added, beside;
  Buffer zeros;  // the state of a head before the first row
  InputsRoom shared, gated;
  SumsRoom sums;
  std::vector<Bench> benches;
  std::vector<Row> given;
  std::vector<int32_t> wanted;  // rows whose logits are wanted
  std::vector<Stretch> stretches;
  std::vector<StateMoves> moves;  // of each stretch
  std::vector<Plan> plans;  // as numbered in Decoder
  MixtureRoom mixture;

  Workspace(const Kernels& kernels, const Sizes& sizes, const MixtureSizes& experts, int32_t threads, int32_t most,
            bool plain, bool norms_after, bool has_beside)
      : rows(most),
        x(floats(sizes.hidden)),
        inputs(floats(sizes.inputs)),
        heads(floats(sizes.projected)),
        mixed(floats(sizes.mixed)),
        queries(floats(sizes.queries)),
        normed(floats(plain || experts.taken ? sizes.hidden : 0)),
        inner(floats(plain ? sizes.inner : 0)),
        added(floats(norms_after ? sizes.hidden : 0)),
        beside(floats(has_beside ? sizes.hidden : 0)),
        zeros(room<float>(size_t(sizes.walks.state))),
        shared(most, sizes.widest()),
        gated(most, sizes.inner),
        mixture(experts, sizes.hidden, most, plain) {
    for (int32_t t = 0; t < threads; ++t) benches.emplace_back(kernels, sizes, experts, most);
  }

 private:
  Buffer floats(int32_t columns) const { return room<float>(size_t(rows) * size_t(columns)); }
};

// Bytes of a number in a KV cache of this type; 0 for an unknown type.
constexpr int32_t number_bytes(int32_t type) {
  return type == CT_F32 ? 4 : type == CT_BF16 || type == CT_F16 ? 2 : type == CT_KV_INT8 || type == CT_KV_FP8 ? 1 : 0;
}

struct Decoder {
  ct_model model;
  const ct_cache cache;
  const Sizes sizes;
  const MixtureSizes mixture;
  Pool& pool;
  const Kernels& kernels;
  std::vector<ct_layer> layers;
  std::vector<ct_experts> experts;           // of the layers that have some
  std::vector<std::vector<ct_feed>> feeds;  // the feed-forwards of each of these, the shared expert last
  Interleaver interleaver;
  const int32_t number_bytes;  // in the KV cache
  const bool plain;        // whether any weight is not quantised, so that its inputs are not rounded
  const bool norms_after;  // whether a layer has a norm after one of its parts
  const bool has_beside;   // whether a part of a layer lies beside another one
  std::vector<Shape> shapes;     // of every layer
  std::vector<size_t> plans;     // for every layer the index of its plan; those without attention have none
  std::vector<int32_t> planned;  // the first layer of each plan
  std::vector<int64_t> blocks;   // for every block table, how many blocks the layers that read it have
  std::unique_ptr<Workspace> space;
  std::vector<Span> spans;  // of the current call

  // The most rows that are computed together.
  int32_t most_rows() const { return mixture.taken ? MOST_ROWS_OF_EXPERTS : MOST_ROWS; }

  Decoder(const ct_model& given, const ct_cache& kv, Pool& team, const Kernels& chosen);
  // Makes room for `rows` rows. Throws std::bad_alloc.
  void reserve(int32_t rows);
  // Returns the bytes from slot to slot of K or V.
  int64_t slot_bytes(const Shape& shape) const {
    return number_bytes > 1 ? int64_t(shape.kv_size) * number_bytes
                            : (int64_t(shape.kv_size) + 4 * shape.kv_heads + 15) / 16 * 16;
  }
  // Returns the slot in which a layer keeps a row of a sequence.
  int64_t slot_at(const ct_layer& layer, const Tables& tables, int32_t row) const {
    const int32_t* table = tables.at(layer.kept.table);
    return int64_t(table[row / cache.block_size]) * cache.block_size + row % cache.block_size;
  }

 private:
  // Replaces the given experts by copies of our own, because the addresses of weights may change.
  void take_experts();
  void note_mapped();
};

inline int32_t forms_of(const ct_feed& feed) { return forms_of(feed.gate_up) | forms_of(feed.down); }

bool fits(const ct_linear& linear, int32_t columns, int32_t rows);
bool fits(const ct_feed& feed, const Sizes& sizes);
// Returns what is wrong with a mixture, null if nothing is.
const char* misfit(const ct_experts& layer, const Sizes& sizes);
// The same check, ignoring the router and the shared expert.
const char* misfit_alone(const ct_experts& layer, const Sizes& sizes);

}  // namespace chatterm

struct ct_decoder : chatterm::Decoder {
  using Decoder::Decoder;
};
