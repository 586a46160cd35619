#include "group.h"

#include <cstring>

namespace chatterm {

namespace {

void run_group(void* group, int32_t thread) { static_cast<Group*>(group)->run(thread); }

}  // namespace

Group::Group(Decoder& given, float* out)
    : decoder(given),
      space(*given.space),
      sizes(given.sizes),
      count(int32_t(given.space->given.size())),
      logits(out) {
  share_attention();
}

const uint8_t* Group::begin(const ct_linear& linear, int32_t outputs, int32_t grain, int32_t thread) const {
  return row_of(linear, Deal::begin(decoder.pool, thread, outputs, grain));
}

// What a product of so many rows reads: make(r, spare) returns row r, in `spare` or where it lies already, and may read
// from(r). Plain weights find all rows from `plain` on.
template <typename From, typename Make>
Inputs Group::inputs(int32_t rows, int32_t columns, int32_t forms, float* plain, Bench& bench, From from, Make make) {
  if (rows == 1) {
    Inputs one = bench.own.of(1, columns);
    one.x = make(0, bench.row.as<float>());
    if (forms & FORM_INT8) decoder.kernels.quantize(one.x, 0, 0, columns, one);
    return one;
  }
  Inputs all = space.shared.of(rows, columns);
  all.x = plain;
  claim_rows(rows, columns, from, [&](int32_t r) {
    const float* row = make(r, forms & FORM_FLOAT ? plain + int64_t(r) * columns : bench.row.as<float>());
    if (forms & FORM_INT8) decoder.kernels.quantize(row, r, 0, columns, all);
  });
  decoder.pool.barrier();
  return all;
}

// The norms of all rows, or of `some`.
Inputs Group::normed(const float* weight, int32_t forms, const std::vector<int32_t>* some, Bench& bench) {
  auto from = [&](int32_t r) { return x(some == nullptr ? r : (*some)[size_t(r)]); };
  const int32_t rows = some == nullptr ? count : int32_t(some->size());
  return inputs(rows, sizes.hidden, forms, space.normed.as<float>(), bench, from, [&](int32_t r, float* spare) {
    decoder.kernels.norm(from(r), weight, sizes.hidden, decoder.model.eps, spare);
    return spare;
  });
}

Inputs Group::put_together(int32_t forms, Bench& bench) {
  auto from = [&](int32_t r) { return mixed(r); };
  return inputs(count, sizes.q_size, forms, mixed(0), bench, from, [&](int32_t r, float* spare) {
    const Queries& some = space.queries[size_t(space.given[size_t(r)].queries)];
    if (!some.apart) return mixed(r);
    float* out = count == 1 ? spare : mixed(r);
    combine(some, r - some.first, space.sums.from(some.sums, sizes.dim), sizes.kv_heads, sizes.kv_heads, out);
    return out;
  });
}

// Outputs first..end of a feed-forward between gate_up and down, for the rows of x; the thread reads `later` after them.
// What it computes it rounds at once, so pieces are as long as what has one scale.
void Group::gate_some(const ct_linear& linear, const ct_linear& down, int32_t first, int32_t end, const Inputs& given,
                      const Inputs& out, const uint8_t* later, Bench& bench) const {
  const int32_t size = out.columns, forms = forms_of(down), rows = given.rows;
  const int32_t unit = few(rows) ? piece_of(rows) / QUANTIZED * QUANTIZED : PANEL;
  const int32_t piece = few(rows) ? unit : QUANTIZED;
  float *gate = bench.tile.as<float>(), *up = bench.other.as<float>();
  for (int32_t from = first; from < end; from += piece) {
    const int32_t to = from + piece < end ? from + piece : end;
    for (int32_t at = from; at < to; at += unit) {
      const int32_t stop = at + unit < to ? at + unit : to;
      float* here = gate + at - from;
      const uint8_t* next = stop < end ? row_of(linear, stop) : later;
      bench.multiplier.multiply(linear, at, stop, given, here, piece, row_of(linear, size + at));
      bench.multiplier.multiply(linear, size + at, size + stop, given, up, unit, next);
      for (int32_t r = 0; r < rows; ++r) {
        decoder.kernels.gate(here + r * piece, up + r * unit, stop - at, here + r * piece);
      }
    }
    for (int32_t r = 0; r < rows; ++r) {
      const float* found = gate + r * piece;
      float* plain = const_cast<float*>(out.x) + int64_t(r) * size + from;
      if (forms & FORM_FLOAT) std::memcpy(plain, found, size_t(to - from) * sizeof(float));
      if (forms & FORM_INT8) decoder.kernels.quantize(found, r, from, to - from, out);
    }
  }
}

Inputs Group::gate_up(const ct_layer& layer, const Inputs& given, int32_t thread) {
  const ct_linear& linear = layer.gate_up;
  const int32_t size = layer.down.parts[0].columns;
  Bench& bench = space.benches[size_t(thread)];
  Inputs all = space.gated.of(count, size);
  all.x = space.inner.as<float>();
  const uint8_t* later = begin(layer.down, sizes.hidden, GRAIN, thread);
  Deal deal(decoder.pool, thread, size, QUANTIZED, few(count));
  for (int32_t first, end, after; deal.next(first, end, after);) {
    gate_some(linear, layer.down, first, end, given, all, after < 0 ? later : row_of(linear, after), bench);
  }
  return all;
}

void Group::run(int32_t thread) {
  const ct_model& model = decoder.model;
  Bench& bench = space.benches[size_t(thread)];
  auto products = [&](const ct_linear& linear, const Inputs& x, const uint8_t* later, float* out, bool add) {
    multiply_share(decoder.pool, bench.multiplier, linear, x, thread, later, bench.tile.as<float>(), out, add);
  };
  claim(count, [&](int32_t r) {
    const ct_matrix& embedding = model.embedding;
    const int32_t token = space.given[size_t(r)].token;
    dequantize_row(embedding.type, embedding.data + token * embedding.row_bytes, embedding.columns, x(r));
  });
  decoder.pool.barrier();
  for (int32_t index = 0; index < model.layer_count; ++index) {
    const ct_layer& layer = decoder.layers[size_t(index)];
    const bool last = index + 1 == model.layer_count;
    const ct_linear& later = last ? model.head : decoder.layers[size_t(index) + 1].qkv;
    Inputs given = normed(layer.input_norm, forms_of(layer.qkv), nullptr, bench);
    products(layer.qkv, given, begin(layer.output, sizes.hidden, GRAIN, thread), heads(0), false);
    decoder.pool.barrier();
    if (count > 1) {
      position(index);
      decoder.pool.barrier();
    }
    attention(index, bench);
    decoder.pool.barrier();
    given = put_together(forms_of(layer.output), bench);
    const ct_experts* experts = layer.experts;
    const uint8_t* feed = experts != nullptr ? row_of(experts->router, 0)
                                             : begin(layer.gate_up, layer.down.parts[0].columns, QUANTIZED, thread);
    products(layer.output, given, feed, x(0), true);
    decoder.pool.barrier();
    if (experts != nullptr) {
      mix(layer, thread, begin(later, rows_of(later), GRAIN, thread));
      continue;
    }
    given = normed(layer.mlp_norm, forms_of(layer.gate_up), nullptr, bench);
    given = gate_up(layer, given, thread);
    decoder.pool.barrier();
    products(layer.down, given, begin(later, rows_of(later), GRAIN, thread), x(0), true);
    decoder.pool.barrier();
  }
  if (space.wanted.empty()) return;
  const Inputs given = normed(model.final_norm, forms_of(model.head), &space.wanted, bench);
  products(model.head, given, row_of(model.head, 0), logits, false);
  decoder.pool.barrier();
}

void run_spans(Decoder& decoder, const ct_span* spans, int32_t count, float* logits) {
  int64_t left = 0;
  for (int32_t i = 0; i < count; ++i) left += spans[i].count;
  int32_t done = 0;  // rows of the first of the spans that are left
  while (left > 0) {
    const int32_t most = decoder.most_rows();
    decoder.reserve(left < most ? int32_t(left) : most);
    Workspace& space = *decoder.space;
    space.given.clear();
    space.wanted.clear();
    space.queries.clear();
    for (int32_t free = most; left > 0 && free > 0;) {
      const int32_t some = spans->count - done < free ? spans->count - done : free;
      const int32_t first = int32_t(space.given.size()), row = spans->row + done, size = decoder.cache.block_size;
      space.queries.push_back({spans->table, row, first, some, 0, false, 0});
      for (int32_t i = 0; i < some; ++i) {
        const int64_t slot = int64_t(spans->table[(row + i) / size]) * size + (row + i) % size;
        space.given.push_back({spans->tokens[done + i], spans->positions[done + i], slot, 0});
      }
      done += some;
      left -= some;
      free -= some;
      if (done == spans->count) {
        if (spans->wanted) space.wanted.push_back(first + some - 1);
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
