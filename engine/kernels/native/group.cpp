#include "group.h"

#include <cstring>

namespace chatterm {

namespace {

void run_group(void* group, int32_t thread) { static_cast<Group*>(group)->run(thread); }

// Returns what a span still has to do with states when the rows before `row` are done.
StateMoves from_row(const StateMoves& given, int32_t row) {
  StateMoves left = given;
  left.source = given.target;
  left.since = row < given.last ? row : given.last;
  for (; left.saves > 0 && *left.saved <= row; --left.saves) ++left.saved, ++left.slots;
  return left;
}

}  // namespace

Group::Group(Decoder& given, float* out)
    : decoder(given),
      space(*given.space),
      sizes(given.sizes),
      count(int32_t(given.space->given.size())),
      logits(out) {
  for (Plan& plan : space.plans) share_attention(plan);
}

const uint8_t* Group::begin(const ct_linear& linear, int32_t outputs, int32_t grain, int32_t thread) const {
  return row_of(linear, Deal::begin(decoder.pool, thread, outputs, grain));
}

const uint8_t* Group::begin_feed(const ct_layer& layer, int32_t thread) const {
  if (layer.experts != nullptr) return row_of(layer.experts->router, 0);
  return begin(layer.feed.gate_up, inner_of(layer.feed), QUANTIZED, thread);
}

const uint8_t* Group::begin_layer(const ct_layer& layer, int32_t thread) const {
  return has_mixer(layer) ? begin(layer.qkv, rows_of(layer.qkv), GRAIN, thread) : begin_feed(layer, thread);
}

void Group::embed(int32_t r, float* spare) const {
  const ct_matrix &embedding = decoder.model.embedding, &learned = decoder.model.learned;
  const Row& row = space.given[size_t(r)];
  const float scale = decoder.model.embedding_scale;
  dequantize_row(embedding.type, embedding.data + row.token * embedding.row_bytes, embedding.columns, x(r));
  for (int32_t i = 0; scale != 1.0f && i < sizes.hidden; ++i) x(r)[i] *= scale;
  if (sizes.inputs > 0) {
    const ct_matrix& other = decoder.model.inputs.embedding;
    float* own = space.inputs.as<float>() + int64_t(r) * sizes.inputs;
    dequantize_row(other.type, other.data + row.token * other.row_bytes, sizes.inputs, own);
    for (int32_t i = 0; i < sizes.inputs; ++i) own[i] *= decoder.model.inputs.scale;
  }
  if (learned.data == nullptr) return;
  dequantize_row(learned.type, learned.data + row.position * learned.row_bytes, learned.columns, spare);
  for (int32_t i = 0; i < sizes.hidden; ++i) x(r)[i] += spare[i];
}

// Returns the norms of all rows, or of `some`; without a norm, the rows themselves.
Inputs Group::normed(const ct_norm& norm, int32_t forms, const std::vector<int32_t>* some, Bench& bench) {
  auto from = [&](int32_t r) { return x(some == nullptr ? r : (*some)[size_t(r)]); };
  const int32_t rows = some == nullptr ? count : int32_t(some->size());
  if (norm.weight == nullptr) {
    return inputs(rows, sizes.hidden, forms, x(0), bench, from, [&](int32_t r, float*) { return x(r); });
  }
  return inputs(rows, sizes.hidden, forms, space.normed.as<float>(), bench, from, [&](int32_t r, float* spare) {
    decoder.kernels.norm(from(r), norm, sizes.hidden, spare);
    return spare;
  });
}

Inputs Group::put_together(int32_t layer, int32_t forms, Bench& bench) {
  const Plan& plan = plan_of(layer);
  const float* sinks = decoder.layers[size_t(layer)].attention.sinks;
  const Shape& shape = shape_at(layer);
  auto from = [&](int32_t r) { return mixed(layer, r); };
  return inputs(count, shape.q_size, forms, mixed(layer, 0), bench, from, [&](int32_t r, float* spare) {
    const Queries& some = plan.queries[size_t(plan.of_row[size_t(r)])];
    float *out = count == 1 ? spare : from(r), *found = from(r);
    if (some.apart) {
      const Sums sums = space.sums.from(some.sums, shape.v_dim);
      combine(layer, some, r - some.first, sums, sinks, shape.kv_heads, shape.kv_heads, out);
      found = out;
    }
    if (shape.gate == 0) return found;
    decoder.kernels.open(heads(layer, r) + shape.gates, shape.gate, shape.dim, shape.q_heads, found, out);
    return out;
  });
}

// Computes outputs first..end of a feed-forward between gate_up and down, for the rows of x; the thread reads `later`
// after them. It rounds its outputs at once, so a piece is as long as the numbers that share a scale.
void Group::gate_some(const ct_feed& feed, int32_t first, int32_t end, const Inputs& given, const Inputs& out,
                      const uint8_t* later, Bench& bench) const {
  const ct_linear& linear = feed.gate_up;
  const int32_t size = out.columns, forms = forms_of(feed.down), rows = given.rows;
  const int32_t piece = few(rows) ? piece_of(rows) / QUANTIZED * QUANTIZED : QUANTIZED;
  float *gate = bench.tile.as<float>(), *up = bench.other.as<float>();
  for (int32_t from = first; from < end; from += piece) {
    const int32_t to = from + piece < end ? from + piece : end;
    const uint8_t* next = to < end ? row_of(linear, to) : later;
    bench.multiplier.multiply(linear, from, to, given, gate, piece, feed.gated ? row_of(linear, size + from) : next);
    if (feed.gated) bench.multiplier.multiply(linear, size + from, size + to, given, up, piece, next);
    for (int32_t r = 0; r < rows; ++r) {
      float* found = gate + r * piece;
      decoder.kernels.gate(feed, found, feed.gated ? up + r * piece : nullptr, to - from, found);
      float* plain = const_cast<float*>(out.x) + int64_t(r) * size + from;
      if (forms & FORM_FLOAT) std::memcpy(plain, found, size_t(to - from) * sizeof(float));
      decoder.kernels.round(found, forms, r, from, to - from, out);
    }
  }
}

Inputs Group::gate_up(const ct_feed& feed, const Inputs& given, int32_t thread) {
  const int32_t size = inner_of(feed);
  Bench& bench = space.benches[size_t(thread)];
  Inputs all = space.gated.of(count, size);
  all.x = space.inner.as<float>();
  const uint8_t* later = begin(feed.down, sizes.hidden, GRAIN, thread);
  Deal deal(decoder.pool, thread, size, QUANTIZED, few(count));
  for (int32_t first, end, after; deal.next(first, end, after);) {
    gate_some(feed, first, end, given, all, after < 0 ? later : row_of(feed.gate_up, after), bench);
  }
  return all;
}

void Group::multiply(const ct_linear& linear, const Inputs& x, const uint8_t* later, float* out, float scale,
                     int32_t thread) {
  Bench& bench = space.benches[size_t(thread)];
  multiply_share(decoder.pool, bench.multiplier, linear, x, thread, later, bench.tile.as<float>(), out, scale);
  decoder.pool.barrier();
}

void Group::add(const ct_linear& linear, const Inputs& given, const uint8_t* later, const ct_norm& norm, float scale,
                float times, int32_t thread) {
  const bool has_norm = norm.weight != nullptr;
  multiply(linear, given, later, has_norm ? added(0) : x(0), has_norm ? 0.0f : scale, thread);
  if (has_norm || times != 1.0f) add_rows(has_norm ? added(0) : nullptr, norm, scale, times);
}

void Group::add_rows(float* rows, const ct_norm& norm, float scale, float times) {
  auto from = [&](int32_t r) { return rows == nullptr ? x(r) : rows + int64_t(r) * sizes.hidden; };
  claim_rows(count, sizes.hidden, from, [&](int32_t r) {
    if (rows != nullptr) {
      if (norm.weight != nullptr) decoder.kernels.norm(from(r), norm, sizes.hidden, from(r));
      for (int32_t i = 0; i < sizes.hidden; ++i) x(r)[i] += scale * from(r)[i];
    }
    for (int32_t i = 0; times != 1.0f && i < sizes.hidden; ++i) x(r)[i] *= times;
  });
  decoder.pool.barrier();
}

void Group::make_inputs(int32_t thread) {
  const ct_inputs& how = decoder.model.inputs;
  Bench& bench = space.benches[size_t(thread)];
  const Inputs given = normed({}, forms_of(how.projection), nullptr, bench);
  float* found = space.heads.as<float>();
  multiply(how.projection, given, begin_layer(layer_at(0), thread), found, 0.0f, thread);
  auto from = [&](int32_t r) { return found + int64_t(r) * sizes.inputs; };
  claim_rows(count, sizes.inputs, from, [&](int32_t r) {
    float* own = space.inputs.as<float>() + int64_t(r) * sizes.inputs;
    for (int32_t i = 0; i < sizes.inputs; i += how.size) {
      decoder.kernels.norm(from(r) + i, how.norm, how.size, from(r) + i);
    }
    for (int32_t i = 0; i < sizes.inputs; ++i) own[i] += from(r)[i];
  });
  decoder.pool.barrier();
}

void Group::add_input(int32_t index, const uint8_t* later, int32_t thread) {
  const ct_layer& layer = layer_at(index);
  const ct_feed& feed = layer.input.feed;
  const int32_t size = decoder.model.inputs.size;
  Bench& bench = space.benches[size_t(thread)];
  float* gates = space.heads.as<float>();
  Inputs given = normed({}, forms_of(feed.gate_up), nullptr, bench);
  multiply(feed.gate_up, given, begin(feed.down, sizes.hidden, GRAIN, thread), gates, 0.0f, thread);
  auto from = [&](int32_t r) { return gates + int64_t(r) * size; };
  given = inputs(count, size, forms_of(feed.down), space.mixed.as<float>(), bench, from, [&](int32_t r, float* spare) {
    const float* own = space.inputs.as<float>() + int64_t(r) * sizes.inputs + int64_t(index) * size;
    decoder.kernels.gate(feed, from(r), own, size, spare);
    return spare;
  });
  add(feed.down, given, later, layer.input.post_norm, 1.0f, layer.scalar, thread);
}

void Group::cap_logits() {
  constexpr int32_t SOME = 8192;
  const int32_t columns = rows_of(decoder.model.head), pieces = (columns + SOME - 1) / SOME;
  claim(int32_t(space.wanted.size()) * pieces, [&](int32_t n) {
    const int32_t first = n % pieces * SOME, left = columns - first;
    float* some = logits + int64_t(n / pieces) * columns + first;
    decoder.kernels.cap(some, left < SOME ? left : SOME, decoder.model.logit_cap);
  });
  decoder.pool.barrier();
}

bool Group::is_put_aside(int32_t layer) const {
  return layer_at(layer).parallel || (layer + 1 < decoder.model.layer_count && layer_at(layer + 1).beside);
}

void Group::run_mixer(int32_t index, const uint8_t* later, float times, int32_t thread) {
  const ct_layer& layer = layer_at(index);
  Bench& bench = space.benches[size_t(thread)];
  Inputs given = normed(layer.input_norm, forms_of(layer.qkv), nullptr, bench);
  const bool latent = layer.latent.kv_rank > 0;
  const uint8_t* after = latent ? row_of(layer.latent.k_b, 0) : begin(layer.output, sizes.hidden, GRAIN, thread);
  multiply(layer.qkv, given, after, heads(index, 0), 0.0f, thread);
  if (layer.beside) {
    const ct_layer& before = layer_at(index - 1);
    add_rows(beside(0), before.attention_post_norm, before.residual_scale, 1.0f);
  }
  if (layer.convolution.width > 0) {
    given = convolve(index, forms_of(layer.output), bench);
  } else if (layer.recurrence.width > 0) {
    given = recur(index, forms_of(layer.output), bench);
  } else if (latent) {
    given = attend_to_latents(index, forms_of(layer.output), thread);
  } else {
    if (positions_first(layer)) {
      position(index, bench);
      decoder.pool.barrier();
    }
    attention(index, bench);
    decoder.pool.barrier();
    given = put_together(index, forms_of(layer.output), bench);
  }
  if (is_put_aside(index)) return multiply(layer.output, given, later, beside(0), 0.0f, thread);
  add(layer.output, given, later, layer.attention_post_norm, layer.residual_scale, times, thread);
}

void Group::run(int32_t thread) {
  const ct_model& model = decoder.model;
  Bench& bench = space.benches[size_t(thread)];
  claim(count, [&](int32_t r) { embed(r, bench.row.as<float>()); });
  decoder.pool.barrier();
  if (sizes.inputs > 0) make_inputs(thread);
  for (int32_t index = 0; index < model.layer_count; ++index) {
    const ct_layer& layer = layer_at(index);
    const bool last = index + 1 == model.layer_count, has_input = sizes.inputs > 0;
    const uint8_t* beyond = last ? begin(model.head, rows_of(model.head), GRAIN, thread)
                                 : begin_layer(layer_at(index + 1), thread);
    const uint8_t* next = has_input ? begin(layer.input.feed.gate_up, model.inputs.size, GRAIN, thread) : beyond;
    const float scalar = has_input ? 1.0f : layer.scalar, times = layer.parallel ? 1.0f : scalar;
    if (has_mixer(layer)) {
      const bool alone = !has_feed(layer);
      run_mixer(index, alone ? next : begin_feed(layer, thread), alone ? times : 1.0f, thread);
    }
    if (layer.experts != nullptr) {
      mix(layer, times, thread, next);
    } else if (has_feed(layer)) {
      Inputs given = normed(layer.mlp_norm, forms_of(layer.feed.gate_up), nullptr, bench);
      given = gate_up(layer.feed, given, thread);
      decoder.pool.barrier();
      add(layer.feed.down, given, next, layer.mlp_post_norm, layer.residual_scale, times, thread);
    }
    if (layer.parallel) add_rows(beside(0), layer.attention_post_norm, layer.residual_scale, scalar);
    if (has_input) add_input(index, beyond, thread);
  }
  if (space.wanted.empty()) return;
  const Inputs given = normed(model.final_norm, forms_of(model.head), &space.wanted, bench);
  multiply(model.head, given, row_of(model.head, 0), logits, 0.0f, thread);
  if (model.logit_cap > 0.0f) cap_logits();
}

void run_spans(Decoder& decoder, const Span* spans, int32_t count, float* logits) {
  int64_t left = 0;
  for (int32_t i = 0; i < count; ++i) left += spans[i].count;
  int32_t done = 0;  // finished rows of the first span that is left
  while (left > 0) {
    const int32_t most = decoder.most_rows();
    decoder.reserve(left < most ? int32_t(left) : most);
    Workspace& space = *decoder.space;
    space.given.clear();
    space.wanted.clear();
    space.stretches.clear();
    space.moves.clear();
    for (int32_t free = most; left > 0 && free > 0;) {
      const int32_t some = spans->count - done < free ? spans->count - done : free;
      const int32_t first = int32_t(space.given.size()), row = spans->row + done;
      space.stretches.push_back({spans->tables, row, first, some});
      space.moves.push_back(done > 0 ? from_row(spans->states, row) : spans->states);
      for (int32_t i = 0; i < some; ++i) {
        space.given.push_back({spans->tokens[done + i], spans->positions[done + i], spans->tables, row + i});
        if (done + i >= spans->count - spans->wanted) space.wanted.push_back(first + i);
      }
      done += some;
      left -= some;
      free -= some;
      if (done == spans->count) {
        ++spans;
        done = 0;
      }
    }
    Group group(decoder, logits);
    decoder.pool.run(run_group, &group);
    logits += int64_t(space.wanted.size()) * rows_of(decoder.model.head);
  }
}

}  // namespace chatterm
