// Creates a decoder, and refuses inputs that do not fit.
#include "decoder.h"

#include <limits>
#include <new>

#include "group.h"

namespace chatterm {

bool fits(const ct_linear& linear, int32_t columns, int32_t rows) {
  if (linear.count < 1 || linear.count > CT_MOST_PARTS) return false;
  for (int32_t p = 0; p < linear.count; ++p) {
    const ct_matrix& part = linear.parts[p];
    if (!is_sound(part) || part.storage == CT_INTERLEAVED || part.columns != columns) return false;
  }
  return rows_of(linear) == rows;
}

bool fits(const ct_feed& feed, const Sizes& sizes) {
  const int32_t inner = inner_of(feed);
  return fits(feed.gate_up, sizes.hidden, feed.gated ? 2 * inner : inner) && fits(feed.down, inner, sizes.hidden);
}

namespace {

constexpr int32_t MOST_DIM = 1024;  // of a head

bool is_plain(const ct_layer& layer) {
  const int32_t feed = layer.experts != nullptr ? forms_of(*layer.experts) : forms_of(layer.feed);
  const int32_t latent = forms_of(layer.latent.q_b) | forms_of(layer.latent.k_b) | forms_of(layer.latent.v_b);
  return (forms_of(layer.qkv) | forms_of(layer.output) | latent | feed | forms_of(layer.input.feed)) & FORM_FLOAT;
}

bool has_plain(const ct_model& model) {
  for (int32_t i = 0; i < model.layer_count; ++i) {
    if (is_plain(model.layers[i])) return true;
  }
  return (forms_of(model.head) | forms_of(model.inputs.projection)) & FORM_FLOAT;
}

bool has_norms_after(const ct_model& model) {
  for (int32_t i = 0; i < model.layer_count; ++i) {
    const ct_layer& layer = model.layers[i];
    for (const ct_norm* norm : {&layer.attention_post_norm, &layer.mlp_post_norm, &layer.input.post_norm}) {
      if (norm->weight != nullptr) return true;
    }
    if (layer.experts != nullptr && chatterm::has_norms_after(*layer.experts)) return true;
  }
  return false;
}

bool has_parts_beside(const ct_model& model) {
  return std::any_of(model.layers, model.layers + model.layer_count, [](const ct_layer& layer) {
    return layer.parallel || layer.beside || (layer.experts != nullptr && chatterm::has_norms_after(*layer.experts));
  });
}

// Whether the parts of latent attention fit together, if there are any.
bool latent_fits(const ct_latent& latent, const ct_attention& attention) {
  const int32_t heads = attention.q_heads, rank = latent.kv_rank, q_rank = q_rank_in(latent);
  if (rank == 0) return true;
  return rank > 0 && rank % 8 == 0 && latent.nope > 0 && latent.rope > 0 && latent.values > 0 &&
         attention.kv_heads == 1 && attention.head_dim == rank + latent.rope && attention.rotated <= latent.rope &&
         latent.kv_norm.weight != nullptr && latent.k_b.count == 1 && fits(latent.k_b, latent.nope, heads * rank) &&
         latent.v_b.count == 1 && fits(latent.v_b, rank, heads * latent.values) &&
         (q_rank == 0 ||
          (latent.q_norm.weight != nullptr && fits(latent.q_b, q_rank, heads * (latent.nope + latent.rope))));
}

// Whether the heads of a recurrence fit together, if there is one.
bool recurrence_fits(const ct_recurrence& how) {
  return how.width == 0 ||
         (how.width > 0 && how.key_heads > 0 && how.value_heads > 0 && how.value_heads % how.key_heads == 0 &&
          how.key_dim > 0 && how.key_dim % 8 == 0 && how.value_dim > 0 && how.value_dim % 8 == 0 &&
          how.states != nullptr && number_bytes(how.type) > 1 &&
          (how.kind == CT_MAMBA2 ? how.skip != nullptr : how.norm.weight != nullptr));
}

bool fits_together(const ct_layer& layer, const ct_model& model, const Sizes& sizes) {
  const ct_attention& attention = layer.attention;
  const ct_convolution& convolution = layer.convolution;
  const ct_feed& input = layer.input.feed;
  const Shape shape(layer);
  const int32_t size = model.inputs.size;
  if (!has_mixer(layer) && !has_feed(layer)) return false;
  if (layer.parallel && !(has_mixer(layer) && has_feed(layer))) return false;
  return (!has_mixer(layer) ||
          (fits(layer.qkv, sizes.hidden, shape.projected) && fits(layer.output, shape.out, sizes.hidden))) &&
         latent_fits(layer.latent, attention) && recurrence_fits(layer.recurrence) &&
         (attention.gate == 0 || attention.gate == 1 || attention.gate == attention.head_dim) &&
         (layer.experts != nullptr || !has_feed(layer) || fits(layer.feed, sizes)) && attention.rotated >= 0 &&
         attention.rotated <= shape.dim && attention.rotated % 2 == 0 && attention.window >= 0 &&
         (attention.beta == 0.0f || attention.original > 0) && convolution.width >= 0 && convolution.size % 8 == 0 &&
         !(layer.parallel && layer.experts != nullptr && chatterm::has_norms_after(*layer.experts)) &&
         (convolution.width == 0 || number_bytes(convolution.type) > 1) && layer.residual_scale != 0.0f &&
         (size == 0 || (fits(input.gate_up, sizes.hidden, size) && fits(input.down, size, sizes.hidden)));
}

// Whether a layer beside the one before can be computed: x must still be what that one got.
bool beside_fits(const ct_layer& before, const ct_layer& layer, const ct_model& model) {
  return has_mixer(before) && !has_feed(before) && !before.beside && before.scalar == 1.0f && has_mixer(layer) &&
         !layer.parallel && model.inputs.size == 0;
}

// Returns what is wrong with the heads of a layer, null if nothing is.
const char* misfit(const ct_attention& attention) {
  if (attention.kv_heads < 1 || attention.q_heads < 1 || attention.q_heads % attention.kv_heads) {
    return "the query heads are no multiple of the KV heads";
  }
  if (attention.head_dim < 8 || attention.head_dim % 8 || attention.head_dim > MOST_DIM) {
    return "the size of a head is no multiple of 8, or above 1024";
  }
  return nullptr;
}

const char* misfit(const ct_model& model, const ct_cache& cache) {
  if (model.layer_count < 0 || model.hidden < 1 || model.positions < 1 || model.inputs.size < 0) {
    return "the sizes of the model are impossible";
  }
  if (number_bytes(cache.type) == 0) return "the KV cache has another dtype";
  if (cache.block_size < 1 || cache.tables < 1) return "the KV cache is empty";
  for (int32_t i = 0; i < model.layer_count; ++i) {
    const ct_kept& kept = model.layers[i].kept;
    if (kept.slots < cache.block_size) return "the KV cache is empty";
    if (kept.table < 0 || kept.table >= cache.tables) return "the KV cache has no such block table";
    if (model.layers[i].convolution.width > 0 || !has_mixer(model.layers[i])) continue;
    if (model.layers[i].recurrence.width > 0) {
      if (cache.states < 1) return "there are no states for recurrences";
      continue;
    }
    if (const char* wrong = misfit(model.layers[i].attention)) return wrong;
    if (model.layers[i].latent.kv_rank > 0 && number_bytes(cache.type) == 1) return "a KV cache of latents is quantised";
  }
  const Sizes sizes(model);
  for (int32_t i = 0; i < model.layer_count; ++i) {
    const ct_layer& layer = model.layers[i];
    if (!fits_together(layer, model, sizes)) {
      return "the weights of a layer do not fit together, or have a type without kernels";
    }
    if (layer.beside && (i == 0 || !beside_fits(model.layers[i - 1], layer, model))) {
      return "a layer does not fit beside the one before";
    }
    if (layer.experts != nullptr) {
      if (const char* wrong = misfit(*layer.experts, sizes)) return wrong;
    }
  }
  if (!is_sound(model.embedding) || model.embedding.storage == CT_INTERLEAVED || model.embedding.columns != model.hidden ||
      !fits(model.head, model.hidden, model.embedding.rows)) {
    return "the embedding or the head does not fit the model, or has a type without kernels";
  }
  const ct_matrix& learned = model.learned;
  if (learned.data != nullptr &&
      (!is_sound(learned) || learned.columns != model.hidden || learned.rows < model.positions)) {
    return "the learned positions do not fit the model, or have a type without kernels";
  }
  const ct_matrix& inputs = model.inputs.embedding;
  if (sizes.inputs > 0 && (!is_sound(inputs) || inputs.storage == CT_INTERLEAVED || inputs.columns != sizes.inputs ||
                           inputs.rows != model.embedding.rows ||
                           !fits(model.inputs.projection, model.hidden, sizes.inputs))) {
    return "the inputs of layers do not fit the model, or have a type without kernels";
  }
  return nullptr;
}

// Reads the span at `at`, which has so many block tables, and moves `at` behind it.
Span read_span(const int32_t*& at, int32_t tables) {
  const int32_t blocks = at[0], row = at[1], tokens = at[2], wanted = at[3], source = at[4], since = at[5], saves = at[6];
  const int32_t *table = at + 7, *token = table + int64_t(tables) * blocks, *position = token + tokens;
  const int32_t *saved = position + tokens, *slots = saved + saves;
  at = slots + saves;
  const int32_t target = saves > 0 ? slots[saves - 1] : source, last = saves > 0 ? saved[saves - 1] : row;
  return {{table, blocks}, token, position, row, tokens, wanted, {source, since, target, last, saves, saved, slots}};
}

// Returns what is wrong with what a span does with the states of recurrences, null if nothing is.
const char* misuse_of_states(const Decoder& decoder, const Span& span) {
  const StateMoves& moves = span.states;
  if (decoder.sizes.walks.state == 0) return moves.saves == 0 ? nullptr : "there are no states";
  if (moves.source < -1 || moves.source >= decoder.cache.states || moves.since < 0 || moves.since > span.row) {
    return "there is no such state";
  }
  int32_t row = span.row;
  for (int32_t i = 0; i < moves.saves; ++i) {
    if (moves.slots[i] < 0 || moves.slots[i] >= decoder.cache.states) return "there is no such state";
    if (moves.saved[i] < row) return "states are saved in another order";
    row = moves.saved[i];
  }
  return moves.saves > 0 && row <= span.row + span.count ? nullptr : "no state of the span is saved";
}

const char* misuse(const Decoder& decoder, const Span& span) {
  if (span.count < 1) return "a span has no tokens";
  if (span.wanted < 0 || span.wanted > span.count) return "a span wants more logits than it has rows";
  for (int32_t i = 0; i < span.count; ++i) {
    if (span.tokens[i] < 0 || span.tokens[i] >= decoder.model.embedding.rows) return "there is no such token";
    if (span.positions[i] < 0 || span.positions[i] >= decoder.model.positions) return "the position is out of range";
  }
  const int64_t size = decoder.cache.block_size, last = int64_t(span.row) + span.count - 1;
  if (span.row < 0 || last / size >= span.tables.blocks) return "the row lies outside the block table";
  for (int32_t t = 0; t < decoder.cache.tables; ++t) {
    const int32_t* table = span.tables.at(t);
    for (int32_t i = 0; i <= last / size; ++i) {
      if (table[i] < 0 || table[i] >= decoder.blocks[size_t(t)]) return "there is no such block";
    }
  }
  return misuse_of_states(decoder, span);
}

}  // namespace

Decoder::Decoder(const ct_model& given, const ct_cache& kv, Pool& team, const Kernels& chosen)
    : model(given),
      cache(kv),
      sizes(given),
      mixture(given),
      pool(team),
      kernels(chosen),
      layers(given.layers, given.layers + given.layer_count),
      number_bytes(chatterm::number_bytes(kv.type)),
      plain(has_plain(given)),
      norms_after(has_norms_after(given)),
      has_beside(has_parts_beside(given)),
      blocks(size_t(kv.tables), std::numeric_limits<int32_t>::max()) {
  for (const ct_layer& layer : layers) {
    int64_t& most = blocks[size_t(layer.kept.table)];
    most = std::min(most, layer.kept.slots / kv.block_size);
    const ct_attention& own = layer.attention;
    size_t number = 0;
    auto as_planned = [&](const ct_layer& given) {
      const ct_attention& other = given.attention;
      return other.window == own.window && other.q_heads == own.q_heads && other.kv_heads == own.kv_heads &&
             given.latent.kv_rank == layer.latent.kv_rank;
    };
    while (number < planned.size() && !as_planned(layers[size_t(planned[number])])) ++number;
    if (number == planned.size() && own.kv_heads > 0) planned.push_back(int32_t(shapes.size()));
    plans.push_back(number);
    shapes.emplace_back(layer);
  }
  take_experts();
  if (chosen.interleaves) note_mapped();
  reserve(TILE);
}

void Decoder::take_experts() {
  for (const ct_layer& layer : layers) {
    if (layer.experts == nullptr) continue;
    const ct_experts& given = *layer.experts;
    experts.push_back(given);
    feeds.emplace_back(given.experts, given.experts + given.count);
    if (given.shared != nullptr) feeds.back().push_back(*given.shared);
  }
  size_t next = 0;
  for (ct_layer& layer : layers) {
    if (layer.experts == nullptr) continue;
    ct_experts& own = experts[next];
    const std::vector<ct_feed>& feed = feeds[next++];
    own.experts = feed.data();
    if (own.shared != nullptr) own.shared = &feed.back();
    layer.experts = &own;
  }
}

void Decoder::note_mapped() {
  size_t next = 0;
  for (ct_layer& layer : layers) {
    interleaver.add(layer.qkv);
    interleaver.add(layer.output);
    interleaver.add(layer.latent.q_b);
    if (layer.latent.kv_rank % PANEL == 0 && layer.latent.values % PANEL == 0) {  // a head has whole panels
      interleaver.add(layer.latent.k_b);
      interleaver.add(layer.latent.v_b);
    }
    interleaver.add(layer.input.feed.gate_up);
    interleaver.add(layer.input.feed.down);
    if (layer.experts == nullptr) {
      interleaver.add(layer.feed.gate_up);
      interleaver.add(layer.feed.down);
      continue;
    }
    for (ct_feed& feed : feeds[next++]) {
      interleaver.add(feed.gate_up);
      interleaver.add(feed.down);
    }
  }
  interleaver.add(model.inputs.projection);
  interleaver.add(model.head);
}

void Decoder::reserve(int32_t rows) {
  if (space != nullptr && rows <= space->rows) return;
  const int32_t most = few(rows) ? TILE : most_rows();
  space = std::make_unique<Workspace>(kernels, sizes, mixture, pool.size(), most, plain, norms_after,
                                      has_beside);
  for (const int32_t layer : planned) space->plans.push_back({layer, {}, {}, {}});
}

}  // namespace chatterm

using namespace chatterm;

ct_decoder* ct_decoder_create(const ct_model* model, const ct_cache* cache, ct_pool* pool, int32_t variant,
                              const char** problem) {
  const Kernels* kernels = kernels_of(variant);
  *problem = kernels == nullptr ? "this machine does not run that variant" : misfit(*model, *cache);
  if (*problem != nullptr) return nullptr;
  try {
    return new ct_decoder(*model, *cache, pool->pool, *kernels);
  } catch (const std::bad_alloc&) {
    *problem = "memory is short";
    return nullptr;
  }
}

void ct_decoder_destroy(ct_decoder* decoder) { delete decoder; }

int64_t ct_decoder_interleave(ct_decoder* decoder, int64_t bytes) {
  try {
    return decoder->interleaver.go_on(decoder->pool, bytes) ? decoder->interleaver.left() : -1;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

const char* ct_decoder_run(ct_decoder* decoder, const int32_t* spans, int32_t count, float* logits) {
  std::vector<Span>& all = decoder->spans;
  try {
    all.clear();
    for (int32_t i = 0; i < count; ++i) {
      all.push_back(read_span(spans, decoder->cache.tables));
      if (const char* wrong = misuse(*decoder, all.back())) return wrong;
    }
    run_spans(*decoder, all.data(), count, logits);
  } catch (const std::bad_alloc&) {
    return "memory is short";
  }
  return nullptr;
}
