// The decode step: one token through the whole model, by all threads of a pool.
//
// Five parts a layer, with a barrier after each. What every product reads (a norm, attention put together, the inner
// activation) each thread computes and quantises for itself: that is less work than another barrier.
//
//   qkv        norm, products                        x -> heads
//   attention  head norm, RoPE, KV write, attention  heads -> parts
//   output     combine, products, residual           parts -> x
//   gate_up    norm, products, SiLU                  x -> inner
//   down       products, residual                    inner -> x
#include <chrono>
#include <cstring>
#include <new>

#include "decoder.h"
#include "variants.h"

namespace chatterm {

namespace {

constexpr int32_t MOST_DIM = 512;  // of a head

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool fits(const ct_linear& linear, int32_t columns, int32_t rows) {
  if (linear.count < 1 || linear.count > 3) return false;
  for (int32_t p = 0; p < linear.count; ++p) {
    if (!is_sound(linear.parts[p]) || linear.parts[p].columns != columns) return false;
  }
  return rows_of(linear) == rows;
}

const uint8_t* row_of(const ct_linear& linear, int32_t row) {
  int32_t p = 0;
  for (; p < linear.count - 1 && row >= linear.parts[p].rows; ++p) row -= linear.parts[p].rows;
  return linear.parts[p].data + row * linear.parts[p].row_bytes;
}

// Rows first..end of a linear layer, bias included, to out[0..]. `next` is what the thread reads after them.
void multiply(const Kernels& kernels, const ct_linear& linear, int32_t first, int32_t end, const Activation& x,
              float* out, const uint8_t* next) {
  int32_t start = 0;
  for (int32_t p = 0; p < linear.count; ++p) {
    const ct_matrix& part = linear.parts[p];
    const int32_t from = first > start ? first : start;
    const int32_t to = end < start + part.rows ? end : start + part.rows;
    if (from < to) {
      const uint8_t* after = to < end ? linear.parts[p + 1].data : next;
      kernels.product_of(part.type)({part.data + int64_t(from - start) * part.row_bytes, size_t(part.row_bytes),
                                     to - from, part.columns, after},
                                    x, out + from - first);
    }
    start += part.rows;
  }
  if (linear.bias != nullptr) {
    for (int32_t r = first; r < end; ++r) out[r - first] += linear.bias[r];
  }
}

const Activation& normed(Decoder& decoder, const float* weight, int32_t forms, Bench& bench) {
  const int32_t hidden = decoder.model.hidden;
  float* out = bench.normed.as<float>();
  decoder.kernels.norm(decoder.x.as<float>(), weight, hidden, decoder.model.eps, out);
  return bench.quantized.of(decoder.kernels, out, hidden, forms);
}

}  // namespace

Clock::Clock(ct_times* times) : times_(times), before_(times == nullptr ? 0.0 : now()) {}

void Clock::add(double ct_times::* part) {
  if (times_ == nullptr) return;
  const double after = now();
  times_->*part += after - before_;
  before_ = after;
}

const char* misfit_of_table(const Decoder& decoder, const int32_t* table, int32_t blocks, int64_t last) {
  const int64_t size = decoder.cache.block_size;
  if (last / size >= blocks) return "the row lies outside the block table";
  for (int32_t i = 0; i <= last / size; ++i) {
    if (table[i] < 0 || table[i] >= decoder.cache.slots / size) return "there is no such block";
  }
  return nullptr;
}

void compute_head(Decoder& decoder, int32_t thread, float* logits) {
  const ct_linear& linear = decoder.model.head;
  const Activation& given =
      normed(decoder, decoder.model.final_norm, forms_of(linear), decoder.benches[size_t(thread)]);
  Deal deal(decoder.pool, thread, rows_of(linear), GRAIN);
  for (int32_t first, end, after; deal.next(first, end, after);) {
    multiply(decoder.kernels, linear, first, end, given, logits + first, row_of(linear, after < 0 ? first : after));
  }
}

namespace {

// One step as the threads see it.
struct Step {
  Decoder& decoder;
  const ct_input& input;
  float* logits;
  ct_times* times;
  Sums sums;           // of the attention to each part of the cache
  int32_t part_count;  // of PART_ROWS
  int32_t part_heads;  // KV heads of a part that one task takes

  void run(int32_t thread);

 private:
  // Where a thread begins in the first `rows` outputs of a layer.
  const uint8_t* begin(const ct_linear& linear, int32_t rows, int32_t thread) const {
    return row_of(linear, Deal::begin(decoder.pool, thread, rows, GRAIN));
  }
  void qkv(int32_t index, int32_t thread);
  void attention(int32_t index, int32_t thread);
  void attend_part(int32_t index, int32_t head, int32_t count, int32_t part, Bench& bench);
  void add(const ct_linear& linear, const Activation& given, int32_t thread, const uint8_t* next);
  void output(int32_t index, int32_t thread);
  void gate_up(int32_t index, int32_t thread);
  void down(int32_t index, int32_t thread);
};

void Step::qkv(int32_t index, int32_t thread) {
  const ct_layer& layer = decoder.layers[size_t(index)];
  const Activation& given = normed(decoder, layer.input_norm, forms_of(layer.qkv), decoder.benches[size_t(thread)]);
  const uint8_t* later = begin(layer.output, decoder.model.hidden, thread);
  Deal deal(decoder.pool, thread, decoder.q_size + 2 * decoder.kv_size, GRAIN);
  float* heads = decoder.heads.as<float>();
  for (int32_t first, end, after; deal.next(first, end, after);) {
    const uint8_t* next = after < 0 ? later : row_of(layer.qkv, after);
    multiply(decoder.kernels, layer.qkv, first, end, given, heads + first, next);
  }
}

void Step::attention(int32_t index, int32_t thread) {
  const int32_t kv_heads = decoder.model.kv_heads, pieces = (kv_heads + part_heads - 1) / part_heads;
  for (int32_t task = decoder.pool.claim(); task < pieces * part_count; task = decoder.pool.claim()) {
    // The parts with the newest row also write it: they come first.
    const int32_t part = part_count - 1 - task / pieces, head = task % pieces * part_heads;
    const int32_t heads = kv_heads - head < part_heads ? kv_heads - head : part_heads;
    attend_part(index, head, heads, part, decoder.benches[size_t(thread)]);
  }
}

void Step::attend_part(int32_t index, int32_t head, int32_t count, int32_t part, Bench& bench) {
  const ct_model& model = decoder.model;
  const ct_cache& cache = decoder.cache;
  const Kernels& kernels = decoder.kernels;
  const int32_t dim = model.head_dim, groups = decoder.groups, queries = count * groups;
  const float* head_norm = decoder.layers[size_t(index)].head_norm;
  const float* rotation = model.rotary + int64_t(input.position) * dim;
  const float* heads = decoder.heads.as<float>();
  // One head of the projection, normed and rotated.
  auto positioned = [&](int32_t which, float* out) {
    const float* from = heads + which * dim;
    if (head_norm != nullptr) {
      kernels.norm(from, head_norm + which * dim, dim, model.eps, out);
    } else {
      std::memcpy(out, from, size_t(dim) * sizeof(float));
    }
    kernels.rotate(out, rotation, dim);
  };
  float* query = bench.query.as<float>();
  const float scale = 1.0f / __builtin_sqrtf(float(dim));
  for (int32_t g = 0; g < queries; ++g) positioned(head * groups + g, query + g * dim);
  for (int32_t i = 0; i < queries * dim; ++i) query[i] *= scale;
  const int64_t stride = int64_t(decoder.kv_size) * decoder.number_bytes;
  const int64_t offset = index * cache.slots * stride + int64_t(head) * dim * decoder.number_bytes;
  uint8_t* k = static_cast<uint8_t*>(cache.k) + offset;
  uint8_t* v = static_cast<uint8_t*>(cache.v) + offset;
  const int32_t first = part * PART_ROWS;
  const int32_t end = first + PART_ROWS < input.row + 1 ? first + PART_ROWS : input.row + 1;
  if (end == input.row + 1) {
    float* keys = query + queries * dim;
    const int64_t slot = int64_t(input.table[input.row / cache.block_size]) * cache.block_size +
                         input.row % cache.block_size;
    for (int32_t h = 0; h < count; ++h) positioned(model.q_heads + head + h, keys + h * dim);
    kernels.store(keys, count * dim, cache.type, k + slot * stride);
    kernels.store(heads + (model.q_heads + model.kv_heads + head) * dim, count * dim, cache.type, v + slot * stride);
  }
  const int64_t place = int64_t(part) * model.q_heads + head * groups;
  kernels.attend({query, k, v, input.table, stride, cache.type, cache.block_size, count, groups, dim, first,
                  end, bench.scores.as<float>(), sums.out + place * dim, sums.most + place, sums.sum + place});
}

void Step::add(const ct_linear& linear, const Activation& given, int32_t thread, const uint8_t* later) {
  float* x = decoder.x.as<float>();
  float* aside = decoder.benches[size_t(thread)].aside.as<float>();
  Deal deal(decoder.pool, thread, decoder.model.hidden, GRAIN);
  for (int32_t first, end, after; deal.next(first, end, after);) {
    for (int32_t from = first; from < end; from += ADD_ROWS) {
      const int32_t to = from + ADD_ROWS < end ? from + ADD_ROWS : end;
      const uint8_t* next = to < end ? row_of(linear, to) : after < 0 ? later : row_of(linear, after);
      multiply(decoder.kernels, linear, from, to, given, aside, next);
      for (int32_t r = from; r < to; ++r) x[r] += aside[r - from];
    }
  }
}

void Step::output(int32_t index, int32_t thread) {
  const ct_model& model = decoder.model;
  const ct_layer& layer = decoder.layers[size_t(index)];
  Bench& bench = decoder.benches[size_t(thread)];
  float* mixed = bench.normed.as<float>();
  decoder.kernels.combine(sums.out, sums.most, sums.sum, part_count, decoder.q_size, model.q_heads, model.head_dim,
                          mixed);
  const Activation& given = bench.quantized.of(decoder.kernels, mixed, decoder.q_size, forms_of(layer.output));
  add(layer.output, given, thread, begin(layer.gate_up, model.inner, thread));
}

void Step::gate_up(int32_t index, int32_t thread) {
  const int32_t size = decoder.model.inner;
  const ct_layer& layer = decoder.layers[size_t(index)];
  const ct_linear& linear = layer.gate_up;
  Bench& bench = decoder.benches[size_t(thread)];
  const Activation& given = normed(decoder, layer.mlp_norm, forms_of(linear), bench);
  const uint8_t* later = begin(layer.down, decoder.model.hidden, thread);
  float *gate = bench.aside.as<float>(), *up = gate + size;
  Deal deal(decoder.pool, thread, size, GRAIN);
  for (int32_t first, end, after; deal.next(first, end, after);) {
    multiply(decoder.kernels, linear, first, end, given, gate, row_of(linear, size + first));
    const uint8_t* next = after < 0 ? later : row_of(linear, after);
    multiply(decoder.kernels, linear, size + first, size + end, given, up, next);
    decoder.kernels.gate(gate, up, end - first, decoder.inner.as<float>() + first);
  }
}

void Step::down(int32_t index, int32_t thread) {
  const ct_model& model = decoder.model;
  const ct_linear& linear = decoder.layers[size_t(index)].down;
  Bench& bench = decoder.benches[size_t(thread)];
  const Activation& given =
      bench.quantized.of(decoder.kernels, decoder.inner.as<float>(), model.inner, forms_of(linear));
  const uint8_t* later = index + 1 == model.layer_count
                             ? begin(model.head, rows_of(model.head), thread)
                             : begin(decoder.layers[size_t(index) + 1].qkv, decoder.q_size + 2 * decoder.kv_size, thread);
  add(linear, given, thread, later);
}

void Step::run(int32_t thread) {
  Clock clock(thread == 0 ? times : nullptr);
  auto done = [&](double ct_times::* part) {
    decoder.pool.barrier();
    clock.add(part);
  };
  if (thread == 0) {
    const ct_matrix& embedding = decoder.model.embedding;
    dequantize_row(embedding.type, embedding.data + input.token * embedding.row_bytes, embedding.columns,
                   decoder.x.as<float>());
  }
  done(&ct_times::embed);
  for (int32_t index = 0; index < decoder.model.layer_count; ++index) {
    qkv(index, thread);
    done(&ct_times::qkv);
    attention(index, thread);
    done(&ct_times::attention);
    output(index, thread);
    done(&ct_times::output);
    gate_up(index, thread);
    done(&ct_times::gate_up);
    down(index, thread);
    done(&ct_times::down);
  }
  compute_head(decoder, thread, logits);
  done(&ct_times::head);
}

const char* misfit(const ct_model& model, const ct_cache& cache) {
  if (model.layer_count < 0 || model.hidden < 1 || model.inner < 1 || model.kv_heads < 1 || model.positions < 1) {
    return "the sizes of the model are impossible";
  }
  if (model.q_heads < 1 || model.q_heads % model.kv_heads) return "the query heads are no multiple of the KV heads";
  if (model.head_dim < 8 || model.head_dim % 8 || model.head_dim > MOST_DIM) {
    return "the size of a head is no multiple of 8, or above 512";
  }
  if (cache.type != CT_F32 && cache.type != CT_BF16 && cache.type != CT_F16) return "the KV cache has another dtype";
  if (cache.block_size < 1 || cache.slots < 1) return "the KV cache is empty";
  const int32_t q = model.q_heads * model.head_dim, kv = model.kv_heads * model.head_dim;
  for (int32_t i = 0; i < model.layer_count; ++i) {
    const ct_layer& layer = model.layers[i];
    if (!fits(layer.qkv, model.hidden, q + 2 * kv) || !fits(layer.output, q, model.hidden) ||
        !fits(layer.gate_up, model.hidden, 2 * model.inner) || !fits(layer.down, model.inner, model.hidden)) {
      return "the weights of a layer do not fit together, or have a type without kernels";
    }
  }
  if (!is_sound(model.embedding) || model.embedding.columns != model.hidden ||
      !fits(model.head, model.hidden, model.embedding.rows)) {
    return "the embedding or the head does not fit the model, or has a type without kernels";
  }
  return nullptr;
}

const char* misuse(const Decoder& decoder, const ct_input& input) {
  if (input.token < 0 || input.token >= decoder.model.embedding.rows) return "there is no such token";
  if (input.position < 0 || input.position >= decoder.model.positions) return "the position is out of range";
  if (input.row < 0) return "the row lies outside the block table";
  return misfit_of_table(decoder, input.table, input.blocks, input.row);
}

void step_of(void* step, int32_t thread) { static_cast<Step*>(step)->run(thread); }

}  // namespace

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

const char* ct_decoder_run(ct_decoder* decoder, const ct_input* input, float* logits, ct_times* times) {
  const char* wrong = misuse(*decoder, *input);
  if (wrong != nullptr) return wrong;
  const int32_t kv_heads = decoder->model.kv_heads, most = decoder->most_tasks;
  const int32_t parts = input->row / PART_ROWS + 1;
  try {
    decoder->sums.reserve(size_t(parts) * size_t(decoder->model.q_heads), decoder->model.head_dim);
  } catch (const std::bad_alloc&) {
    return "memory is short";
  }
  // Heads that lie side by side are read together, unless threads would find too little.
  const int32_t part_heads = (kv_heads * parts + most - 1) / most;
  Step step{*decoder, *input, logits, times, decoder->sums.from(0, decoder->model.head_dim), parts, part_heads};
  decoder->pool.run(step_of, &step);
  return nullptr;
}
