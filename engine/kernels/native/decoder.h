// What a decoder keeps between its calls.
#pragma once

#include <memory>
#include <vector>

#include "experts.h"
#include "interleave.h"
#include "multiply.h"
#include "team.h"

namespace chatterm {

constexpr int32_t MOST_ROWS = 128;             // more share the unpacking no better, and their numbers leave the cache
constexpr int32_t MOST_ROWS_OF_EXPERTS = 512;  // each is read by some of the rows only
constexpr int32_t MOST_QUERIES = 32;           // rows whose queries read K and V together
constexpr int32_t TASKS_A_THREAD = 4;          // of attention, that the threads finish together
constexpr int32_t QUANTIZED = 32;              // numbers that are rounded to int8 together

inline int32_t inner_of(const ct_feed& feed) { return feed.down.parts[0].columns; }

// The sizes that memory depends on; `inner` is the largest of all layers.
struct Sizes {
  int32_t hidden, inner, q_heads, kv_heads, groups, dim, q_size, kv_size;

  explicit Sizes(const ct_model& model)
      : hidden(model.hidden),
        inner(0),
        q_heads(model.q_heads),
        kv_heads(model.kv_heads),
        groups(model.q_heads / model.kv_heads),
        dim(model.head_dim),
        q_size(model.q_heads * model.head_dim),
        kv_size(model.kv_heads * model.head_dim) {
    for (int32_t i = 0; i < model.layer_count; ++i) {
      const ct_experts* experts = model.layers[i].experts;
      grow(inner_of(model.layers[i].feed));
      for (int32_t e = 0; experts != nullptr && e < experts->count; ++e) grow(inner_of(experts->experts[e]));
      if (experts != nullptr && experts->shared != nullptr) grow(inner_of(*experts->shared));
    }
  }
  int32_t heads() const { return q_size + 2 * kv_size; }
  int32_t widest() const {
    const int32_t most = hidden > inner ? hidden : inner;
    return most > q_size ? most : q_size;
  }

 private:
  void grow(int32_t own) { inner = own > inner ? own : inner; }
};

// What one thread has for itself, where up to `rows` rows are computed together.
struct Bench {
  InputsRoom own;  // of one row
  Buffer row, tile, other, query, scores, keys, values;
  SumsRoom sums;
  Multiplier multiplier;
  Visits visits;

  Bench(const Kernels& kernels, const Sizes& sizes, const MixtureSizes& mixture, int32_t rows)
      : own(1, sizes.widest()),
        row(room<float>(size_t(sizes.widest()))),
        tile(room<float>(tile_of(rows))),
        other(room<float>(tile_of(rows))),
        query(room<float>(queries(sizes, rows) * size_t(sizes.dim))),
        scores(room<float>(queries(sizes, rows) * ATTEND_ROWS)),
        keys(room<float>(size_t(sizes.dim) * ATTEND_ROWS)),
        values(room<float>(size_t(padded(sizes.dim)) * ATTEND_ROWS)),
        multiplier(kernels, sizes.widest(), rows),
        visits(mixture, rows) {}

 private:
  static size_t tile_of(int32_t rows) { return few(rows) ? PIECE : up_to(rows, TILE) * QUANTIZED; }
  // All heads of a row and its key, or one KV head of several rows.
  static size_t queries(const Sizes& sizes, int32_t rows) {
    const int32_t one = sizes.q_heads + sizes.kv_heads;
    const int32_t several = (rows < MOST_QUERIES ? rows : MOST_QUERIES) * sizes.groups;
    return size_t(one > several ? one : several);
  }
};

// Of one sequence, as `ct_decoder_run` is told of it.
struct Span {
  const int32_t* table;
  const int32_t* tokens;
  const int32_t* positions;
  int32_t blocks;
  int32_t row;
  int32_t count;
  int32_t wanted;
};

// A row of activations and the token it belongs to.
struct Row {
  int32_t token;
  int32_t position;
  int64_t slot;
};

// Rows of one sequence that lie side by side.
struct Stretch {
  const int32_t* table;
  int32_t row;    // of the first of them in the sequence
  int32_t first;  // the same in the group
  int32_t count;
};

// Those whose queries read K and V together, and the parts of the context that they see, PART_ROWS each.
struct Queries : Stretch {
  int32_t part, end;
  bool apart;   // whether each part is a task of its own, whose sums are put together afterwards
  size_t sums;  // where these are: [parts][kv_heads][count][groups]

  int32_t parts() const { return end - part; }
};

// What a thread attends at once: some KV heads of one row or one of several rows, over parts of the context.
struct Task {
  int32_t queries;
  int32_t head, heads;
  int32_t part, end;
};

// How the rows of a group are attended to in all layers of one window.
struct Plan {
  int32_t window;  // as in ct_attention
  std::vector<Queries> queries;
  std::vector<Task> tasks;
  std::vector<int32_t> of_row;  // which of the queries each row belongs to
};

// Room for up to `rows` rows that are computed together, and what is known of them before the first layer.
struct Workspace {
  int32_t rows;
  // fp32 [rows][...]: `normed` and `inner` are for plain weights, `added` for what is normed before it is added to x
  Buffer x, heads, mixed, normed, inner, added;
  InputsRoom shared, gated;
  SumsRoom sums;
  std::vector<Bench> benches;
  std::vector<Row> given;
  std::vector<int32_t> wanted;  // rows whose logits are
  std::vector<Stretch> stretches;
  std::vector<Plan> plans;  // by the number of their window in Decoder
  MixtureRoom mixture;

  Workspace(const Kernels& kernels, const Sizes& sizes, const MixtureSizes& experts, int32_t threads, int32_t most,
            bool plain, bool norms_after)
      : rows(most),
        x(floats(sizes.hidden)),
        heads(floats(sizes.heads())),
        mixed(floats(sizes.q_size)),
        normed(floats(plain || experts.taken ? sizes.hidden : 0)),
        inner(floats(plain ? sizes.inner : 0)),
        added(floats(norms_after ? sizes.hidden : 0)),
        shared(most, sizes.widest()),
        gated(most, sizes.inner),
        mixture(experts, sizes.hidden, most, plain) {
    for (int32_t t = 0; t < threads; ++t) benches.emplace_back(kernels, sizes, experts, most);
  }

 private:
  Buffer floats(int32_t columns) const { return room<float>(size_t(rows) * size_t(columns)); }
};

// Of a number in a KV cache of this type; 0 for one that there is not.
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
  std::vector<ct_experts> experts;           // those of the layers that have some
  std::vector<std::vector<ct_feed>> feeds;  // of these: the experts, the shared one last
  Interleaver interleaver;
  const int32_t number_bytes;  // in the KV cache
  const int64_t slot_bytes;
  const bool plain;        // whether a weight is multiplied with what is not rounded
  const bool norms_after;  // whether a layer has a norm after one of its parts
  std::vector<int32_t> windows;  // that layers have, each once
  std::vector<size_t> plans;     // of every layer: the number of its window
  std::unique_ptr<Workspace> space;
  std::vector<Span> spans;  // of a call

  // Rows that are computed together.
  int32_t most_rows() const { return mixture.taken ? MOST_ROWS_OF_EXPERTS : MOST_ROWS; }

  Decoder(const ct_model& given, const ct_cache& kv, Pool& team, const Kernels& chosen);
  // Have room for `rows` rows. Throws std::bad_alloc.
  void reserve(int32_t rows);

 private:
  // Experts of its own, in place of those that were told of: where weights lie may change.
  void take_experts();
  void note_mapped();
};

inline int32_t forms_of(const ct_feed& feed) { return forms_of(feed.gate_up) | forms_of(feed.down); }

bool fits(const ct_linear& linear, int32_t columns, int32_t rows);
bool fits(const ct_feed& feed, const Sizes& sizes);
// What is wrong with a mixture, null for nothing.
const char* misfit(const ct_experts& layer, const Sizes& sizes);
// The same, whatever its router and its shared expert are.
const char* misfit_alone(const ct_experts& layer, const Sizes& sizes);

}  // namespace chatterm

struct ct_decoder : chatterm::Decoder {
  using Decoder::Decoder;
};
