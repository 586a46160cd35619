// A chunk of a prompt through the whole model, by all threads of a pool: up to MOST_ROWS tokens share every reading and
// unpacking of the weights. A barrier after each part; within a part the threads claim rows, panels or queries.
#include <cstring>
#include <new>

#include "chunk.h"
#include "decoder.h"
#include "variants.h"

namespace chatterm {

namespace {

constexpr int32_t MOST_ROWS = 128;    // more share the unpacking no better, and their numbers leave the cache
constexpr int32_t SOME_ROWS = 8;       // rows of activations that a thread takes at once
constexpr int32_t QUANTIZED = 32;     // numbers that are rounded to int8 together
constexpr int32_t MOST_QUERIES = 32;  // rows whose queries read K and V together
constexpr int32_t LEAST_QUERIES = 4;

size_t up_to(int32_t count, int32_t unit) { return size_t((count + unit - 1) / unit * unit); }

}  // namespace

GridRoom::GridRoom(int32_t rows, int32_t columns)
    : q_(up_to(rows, TILE) * size_t(columns)),
      scale_(room<float>(up_to(rows, TILE) * size_t(columns / 32))),
      low_(room<float>(up_to(rows, TILE) * size_t(columns / 32))),
      low_16_(room<float>(up_to(rows, TILE) * size_t(columns / 16))),
      grid{q_.as<uint32_t>(), scale_.as<float>(), low_.as<float>(), low_16_.as<float>()} {}

PanelRoom::PanelRoom(int32_t columns, int32_t rows)
    : digits_(size_t(columns) * PANEL),
      scale_(room<float>(size_t(columns / 16 * PANEL))),
      low_(room<float>(size_t(columns / 16 * PANEL))),
      piece_(room<float>(up_to(rows, TILE) * PANEL)),
      panel_{digits_.as<uint32_t>(), scale_.as<float>(), low_.as<float>(), 0, 0} {}

void PanelRoom::multiply(const Kernels& kernels, const ct_linear& linear, int32_t first, int32_t end,
                         const Grid& grid, int32_t rows, float* out) {
  int32_t start = 0;
  for (int32_t p = 0; p < linear.count; ++p) {
    const ct_matrix& part = linear.parts[p];
    const int32_t from = first > start ? first : start;
    const int32_t to = end < start + part.rows ? end : start + part.rows;
    if (from < to) {
      const bool whole = from == first && to == end;
      float* piece = whole ? out : piece_.as<float>();
      kernels.unpack(part, from - start, to - from, panel_);
      kernels.multiply_panel(panel_, grid, rows, piece);
      for (int32_t r = 0; r < rows && !whole; ++r) {
        std::memcpy(out + r * PANEL + from - first, piece + r * PANEL, size_t(to - from) * sizeof(float));
      }
    }
    start += part.rows;
  }
  if (linear.bias != nullptr) {
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t i = first; i < end; ++i) out[r * PANEL + i - first] += linear.bias[i];
    }
  }
}

// What one thread has for itself.
struct ChunkBench {
  Buffer normed, tile, other_tile, gated, query, mixed, scores, keys, values;
  SumsRoom sums;
  PanelRoom panel;

  ChunkBench(int32_t widest, int32_t queries, int32_t dim)
      : normed(room<float>(size_t(widest))),
        tile(room<float>(MOST_ROWS * PANEL)),
        other_tile(room<float>(MOST_ROWS * PANEL)),
        gated(room<float>(MOST_ROWS * QUANTIZED)),
        query(room<float>(size_t(queries) * size_t(dim))),
        mixed(room<float>(size_t(queries) * size_t(padded(dim)))),
        scores(room<float>(size_t(queries) * ATTEND_ROWS)),
        keys(room<float>(size_t(dim) * ATTEND_ROWS)),
        values(room<float>(size_t(padded(dim)) * ATTEND_ROWS)),
        panel(widest, MOST_ROWS) {}
};

struct Workspace {
  Buffer x, heads, mixed;  // [MOST_ROWS][...]
  GridRoom room, inner;
  SumsRoom sums;
  std::vector<ChunkBench> benches;

  Workspace(const Decoder& decoder, int32_t widest)
      : x(chatterm::room<float>(MOST_ROWS * size_t(decoder.model.hidden))),
        heads(chatterm::room<float>(MOST_ROWS * size_t(decoder.q_size + 2 * decoder.kv_size))),
        mixed(chatterm::room<float>(MOST_ROWS * size_t(decoder.q_size))),
        room(MOST_ROWS, widest),
        inner(MOST_ROWS, decoder.model.inner) {
    for (int32_t t = 0; t < decoder.pool.size(); ++t) {
      benches.emplace_back(widest, MOST_QUERIES * decoder.groups, decoder.model.head_dim);
    }
  }
};

namespace {

// Up to MOST_ROWS tokens as the threads see them.
struct Chunk {
  Decoder& decoder;
  Workspace& space;
  const int32_t* table;
  const int32_t* tokens;
  const int32_t* positions;
  int32_t row;    // of the first token in the sequence
  int32_t count;  // of tokens
  float* logits;
  ct_times* times;
  int32_t queries = 0;  // rows of a task of the attention
  bool apart = false;   // whether each part of the context is a task too

  // Raises bad_alloc.
  void share_attention();
  void run(int32_t thread);

 private:
  float* x(int32_t r) const { return space.x.as<float>() + int64_t(r) * decoder.model.hidden; }
  float* heads(int32_t r) const {
    return space.heads.as<float>() + int64_t(r) * (decoder.q_size + 2 * decoder.kv_size);
  }
  float* mixed(int32_t r) const { return space.mixed.as<float>() + int64_t(r) * decoder.q_size; }
  uint8_t* cached(void* numbers, int32_t index) const {
    return static_cast<uint8_t*>(numbers) + index * decoder.cache.slots * slot_bytes();
  }
  int64_t slot_bytes() const { return int64_t(decoder.kv_size) * decoder.number_bytes; }

  // Calls part(n) for every n below `parts`; each is one thread's.
  template <typename Part>
  void claim(int32_t parts, Part part) const {
    for (int32_t n = decoder.pool.claim(); n < parts; n = decoder.pool.claim()) part(n);
  }
  // Calls part(first, end) for the outputs of a layer, PANEL at a time.
  template <typename Part>
  void claim_panels(int32_t outputs, Part part) const {
    claim((outputs + PANEL - 1) / PANEL, [&](int32_t n) {
      part(n * PANEL, (n + 1) * PANEL < outputs ? (n + 1) * PANEL : outputs);
    });
  }
  // Calls part(r) for every row of numbers [count][columns]; what another thread has in its cache is asked for first.
  template <typename Part>
  void claim_rows(const float* numbers, int32_t columns, Part part) const {
    const int32_t fair = count / (4 * decoder.pool.working()), some = fair < 1 ? 1 : fair < SOME_ROWS ? fair : SOME_ROWS;
    claim((count + some - 1) / some, [&](int32_t n) {
      const int32_t first = n * some, end = first + some < count ? first + some : count;
      for (const float* at = numbers + int64_t(first) * columns; at < numbers + int64_t(end) * columns; at += 16) {
        __builtin_prefetch(at);
      }
      for (int32_t r = first; r < end; ++r) part(r);
    });
  }
  void norm(const float* weight, ChunkBench& bench);
  void quantize(const float* numbers, int32_t columns);
  void qkv(int32_t index, ChunkBench& bench);
  void position(int32_t index);
  void attention(int32_t index, ChunkBench& bench);
  struct Some {
    int32_t head, first, count;
  };
  int32_t blocks() const { return (count + queries - 1) / queries; }
  int32_t parts_of(int32_t rows) const;
  Some some_of(int32_t task) const;
  void attend_some(int32_t index, int32_t task, int32_t part, int32_t end, const Sums& sums, ChunkBench& bench);
  void combine_some(int32_t task, const Sums& sums, ChunkBench& bench);
  void add(const ct_linear& linear, const Grid& grid, ChunkBench& bench);
  void gate_up(int32_t index, ChunkBench& bench);
};

void Chunk::norm(const float* weight, ChunkBench& bench) {
  const int32_t hidden = decoder.model.hidden;
  claim_rows(x(0), hidden, [&](int32_t r) {
    decoder.kernels.norm(x(r), weight, hidden, decoder.model.eps, bench.normed.as<float>());
    decoder.kernels.quantize_part(bench.normed.as<float>(), hidden, r, 0, hidden, space.room.grid);
  });
}

void Chunk::quantize(const float* numbers, int32_t columns) {
  claim_rows(numbers, columns, [&](int32_t r) {
    decoder.kernels.quantize_part(numbers + int64_t(r) * columns, columns, r, 0, columns, space.room.grid);
  });
}

void Chunk::qkv(int32_t index, ChunkBench& bench) {
  const ct_linear& linear = decoder.layers[size_t(index)].qkv;
  float* tile = bench.tile.as<float>();
  claim_panels(rows_of(linear), [&](int32_t first, int32_t end) {
    for (int32_t r = 0; r < count; ++r) __builtin_prefetch(heads(r) + first, 1);
    bench.panel.multiply(decoder.kernels, linear, first, end, space.room.grid, count, tile);
    for (int32_t r = 0; r < count; ++r) {
      std::memcpy(heads(r) + first, tile + r * PANEL, size_t(end - first) * sizeof(float));
    }
  });
}

// Norms and rotates q and k in place, and writes K and V.
void Chunk::position(int32_t index) {
  const ct_model& model = decoder.model;
  const ct_cache& cache = decoder.cache;
  const int32_t dim = model.head_dim;
  const float* head_norm = decoder.layers[size_t(index)].head_norm;
  claim_rows(heads(0), decoder.q_size + 2 * decoder.kv_size, [&](int32_t r) {
    float* head = heads(r);
    const float* rotation = model.rotary + int64_t(positions[r]) * dim;
    for (int32_t h = 0; h < model.q_heads + model.kv_heads; ++h) {
      float* one = head + h * dim;
      if (head_norm != nullptr) decoder.kernels.norm(one, head_norm + h * dim, dim, model.eps, one);
      decoder.kernels.rotate(one, rotation, dim);
    }
    const int32_t at = row + r;
    const int64_t slot = int64_t(table[at / cache.block_size]) * cache.block_size + at % cache.block_size;
    const float *k = head + decoder.q_size, *v = k + decoder.kv_size;
    decoder.kernels.store(k, decoder.kv_size, cache.type, cached(cache.k, index) + slot * slot_bytes());
    decoder.kernels.store(v, decoder.kv_size, cache.type, cached(cache.v, index) + slot * slot_bytes());
  });
}

int32_t Chunk::parts_of(int32_t rows) const { return (row + rows + PART_ROWS - 1) / PART_ROWS; }

// Threads share K and V rather than the queries of few rows, for each task makes numbers of all K and V it sees.
void Chunk::share_attention() {
  const int32_t kv_heads = decoder.model.kv_heads, parts = parts_of(count);
  apart = count <= MOST_QUERIES && parts > 1;
  // So many queries together that every thread finds some.
  queries = count * kv_heads * (apart ? parts : 1) / (4 * decoder.pool.working());
  queries = queries < LEAST_QUERIES ? LEAST_QUERIES : queries > MOST_QUERIES ? MOST_QUERIES : queries;
  const size_t sums = size_t(parts) * size_t(queries * decoder.groups);
  if (apart) {
    space.sums.reserve(sums * size_t(blocks() * kv_heads), decoder.model.head_dim);
  } else {
    for (ChunkBench& bench : space.benches) bench.sums.reserve(sums, decoder.model.head_dim);
  }
}

void Chunk::attention(int32_t index, ChunkBench& bench) {
  const int32_t parts = parts_of(count), dim = decoder.model.head_dim, tasks = blocks() * decoder.model.kv_heads;
  const size_t size = size_t(parts) * size_t(queries * decoder.groups);
  if (!apart) {
    claim(tasks, [&](int32_t task) {
      const Sums sums = bench.sums.from(0, dim);
      attend_some(index, task, 0, parts, sums, bench);
      combine_some(task, sums, bench);
    });
    return;
  }
  claim(tasks * parts, [&](int32_t n) {
    const Sums sums = space.sums.from(size_t(n % tasks) * size, dim);
    attend_some(index, n % tasks, n / tasks, n / tasks + 1, sums, bench);
  });
  decoder.pool.barrier();
  claim(tasks, [&](int32_t task) { combine_some(task, space.sums.from(size_t(task) * size, dim), bench); });
}

// The rows of a task. The last rows see most: they come first.
Chunk::Some Chunk::some_of(int32_t task) const {
  const int32_t kv_heads = decoder.model.kv_heads;
  const int32_t first = (blocks() - 1 - task / kv_heads) * queries;
  return {task % kv_heads, first, first + queries < count ? queries : count - first};
}

void Chunk::attend_some(int32_t index, int32_t task, int32_t part, int32_t end, const Sums& sums,
                        ChunkBench& bench) {
  const Some some = some_of(task);
  const int32_t dim = decoder.model.head_dim, groups = decoder.groups, size = groups * dim;
  const int32_t rows = row + some.first + some.count, together = some.count * groups;
  const float scale = 1.0f / __builtin_sqrtf(float(dim));
  float* query = bench.query.as<float>();
  for (int32_t r = 0; r < some.count; ++r) {
    const float* from = heads(some.first + r) + some.head * size;
    for (int32_t i = 0; i < size; ++i) query[r * size + i] = from[i] * scale;
  }
  const int64_t offset = int64_t(some.head) * dim * decoder.number_bytes;
  for (; part < end && part * PART_ROWS < rows; ++part) {
    const int32_t first = part * PART_ROWS, last = first + PART_ROWS < rows ? first + PART_ROWS : rows;
    const size_t place = size_t(part) * size_t(together);
    decoder.kernels.attend_chunk(
        {query, cached(decoder.cache.k, index) + offset, cached(decoder.cache.v, index) + offset, table,
         slot_bytes(), decoder.cache.type, decoder.cache.block_size, together, groups, dim, rows - 1, first, last,
         bench.keys.as<float>(), bench.values.as<float>(), bench.scores.as<float>(),
         sums.out + place * size_t(padded(dim)), sums.most + place, sums.sum + place});
  }
}

void Chunk::combine_some(int32_t task, const Sums& sums, ChunkBench& bench) {
  const Some some = some_of(task);
  const int32_t dim = decoder.model.head_dim, groups = decoder.groups, wide = padded(dim);
  const int32_t together = some.count * groups;
  float* out = bench.mixed.as<float>();
  decoder.kernels.combine(sums.out, sums.most, sums.sum, parts_of(some.first + some.count), together * wide,
                          together, wide, out);
  for (int32_t r = 0; r < some.count; ++r) {
    for (int32_t g = 0; g < groups; ++g) {
      const float* from = out + (r * groups + g) * wide;
      std::memcpy(mixed(some.first + r) + (some.head * groups + g) * dim, from, size_t(dim) * sizeof(float));
    }
  }
}

void Chunk::add(const ct_linear& linear, const Grid& grid, ChunkBench& bench) {
  float* tile = bench.tile.as<float>();
  claim_panels(decoder.model.hidden, [&](int32_t first, int32_t end) {
    // Another thread has them in its cache.
    for (int32_t r = 0; r < count; ++r) __builtin_prefetch(x(r) + first, 1);
    bench.panel.multiply(decoder.kernels, linear, first, end, grid, count, tile);
    for (int32_t r = 0; r < count; ++r) {
      float* to = x(r);
      for (int32_t i = first; i < end; ++i) to[i] += tile[r * PANEL + i - first];
    }
  });
}

// The numbers become int8 at once, 32 columns by 32, for `down`.
void Chunk::gate_up(int32_t index, ChunkBench& bench) {
  const ct_linear& linear = decoder.layers[size_t(index)].gate_up;
  const int32_t size = decoder.model.inner;
  float *gate = bench.tile.as<float>(), *up = bench.other_tile.as<float>(), *both = bench.gated.as<float>();
  claim(size / QUANTIZED, [&](int32_t n) {
    for (int32_t part = 0; part < QUANTIZED; part += PANEL) {
      const int32_t first = n * QUANTIZED + part, end = first + PANEL;
      bench.panel.multiply(decoder.kernels, linear, first, end, space.room.grid, count, gate);
      bench.panel.multiply(decoder.kernels, linear, size + first, size + end, space.room.grid, count, up);
      for (int32_t r = 0; r < count; ++r) {
        decoder.kernels.gate(gate + r * PANEL, up + r * PANEL, PANEL, both + r * QUANTIZED + part);
      }
    }
    for (int32_t r = 0; r < count; ++r) {
      decoder.kernels.quantize_part(both + r * QUANTIZED, size, r, n * QUANTIZED, QUANTIZED, space.inner.grid);
    }
  });
}

void Chunk::run(int32_t thread) {
  const ct_model& model = decoder.model;
  ChunkBench& bench = space.benches[size_t(thread)];
  Clock clock(thread == 0 ? times : nullptr);
  auto done = [&](double ct_times::* part) {
    decoder.pool.barrier();
    clock.add(part);
  };
  claim(count, [&](int32_t r) {
    const ct_matrix& embedding = model.embedding;
    dequantize_row(embedding.type, embedding.data + tokens[r] * embedding.row_bytes, embedding.columns, x(r));
  });
  done(&ct_times::embed);
  for (int32_t index = 0; index < model.layer_count; ++index) {
    const ct_layer& layer = decoder.layers[size_t(index)];
    norm(layer.input_norm, bench);
    done(&ct_times::qkv);
    qkv(index, bench);
    done(&ct_times::qkv);
    position(index);
    done(&ct_times::attention);
    attention(index, bench);
    done(&ct_times::attention);
    quantize(mixed(0), decoder.q_size);
    done(&ct_times::output);
    add(layer.output, space.room.grid, bench);
    done(&ct_times::output);
    norm(layer.mlp_norm, bench);
    done(&ct_times::gate_up);
    gate_up(index, bench);
    done(&ct_times::gate_up);
    add(layer.down, space.inner.grid, bench);
    done(&ct_times::down);
  }
  if (logits == nullptr) return;
  if (thread == 0) std::memcpy(decoder.x.as<float>(), x(count - 1), size_t(model.hidden) * sizeof(float));
  done(&ct_times::head);
  compute_head(decoder, thread, logits);
  done(&ct_times::head);
}

void chunk_of(void* chunk, int32_t thread) { static_cast<Chunk*>(chunk)->run(thread); }

bool is_quantized(const ct_linear& linear) { return !(forms_of(linear) & FORM_FLOAT); }

const char* misuse(const Decoder& decoder, const ct_chunk& given) {
  const ct_model& model = decoder.model;
  for (const ct_layer& layer : decoder.layers) {
    if (!is_quantized(layer.qkv) || !is_quantized(layer.output) || !is_quantized(layer.gate_up) ||
        !is_quantized(layer.down)) {
      return "chunks are for quantised weights";
    }
  }
  if (given.count < 0 || given.row < 0) return "the rows are impossible";
  if (given.count == 0) return nullptr;
  for (int32_t i = 0; i < given.count; ++i) {
    if (given.tokens[i] < 0 || given.tokens[i] >= model.embedding.rows) return "there is no such token";
    if (given.positions[i] < 0 || given.positions[i] >= model.positions) return "the position is out of range";
  }
  return misfit_of_table(decoder, given.table, given.blocks, int64_t(given.row) + given.count - 1);
}

int32_t widest_of(const Decoder& decoder) {
  int32_t widest = decoder.model.hidden;
  for (int32_t size : {decoder.q_size, decoder.model.inner}) widest = size > widest ? size : widest;
  return widest;
}

}  // namespace

}  // namespace chatterm

using namespace chatterm;

const char* ct_decoder_run_chunk(ct_decoder* decoder, const ct_chunk* chunk, float* logits, ct_times* times) {
  const char* wrong = misuse(*decoder, *chunk);
  if (wrong != nullptr) return wrong;
  try {
    if (decoder->workspace == nullptr) {
      decoder->workspace = std::make_shared<Workspace>(*decoder, widest_of(*decoder));
    }
    for (int32_t done = 0; done < chunk->count; done += MOST_ROWS) {
      const int32_t count = chunk->count - done < MOST_ROWS ? chunk->count - done : MOST_ROWS;
      Chunk part{*decoder, *decoder->workspace, chunk->table, chunk->tokens + done, chunk->positions + done,
                 chunk->row + done, count, done + count == chunk->count ? logits : nullptr, times};
      part.share_attention();
      decoder->pool.run(chunk_of, &part);
    }
  } catch (const std::bad_alloc&) {
    return "memory is short";
  }
  return nullptr;
}
