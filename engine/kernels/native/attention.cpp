// The attention of a group: rows of different sequences and parts of a long context are separate tasks. A query's sums
// are kept separately for every PART_ROWS rows of its context and combined in order, so they depend neither on the
// tasks nor on what else is computed. Parts before the window of a row are not read; rows before it within the first
// part that is read have no weight.
#include <cmath>
#include <cstring>

#include "group.h"

namespace chatterm {

namespace {

constexpr int32_t LEAST_QUERIES = 4;

// Divides, rounding up.
int32_t up(int32_t number, int32_t by) { return (number + by - 1) / by; }

int32_t parts_of(int32_t rows) { return up(rows, PART_ROWS); }

// Returns the first row that a row sees.
int32_t first_seen(int32_t row, int32_t window) { return window > 0 && row >= window ? row + 1 - window : 0; }

int32_t within(int32_t value, int32_t least, int32_t most) {
  return value < least ? least : value > most ? most : value;
}

// Returns `count` rows from row `from` of a stretch on. Threads divide K and V rather than the queries of a few rows,
// because each task converts all K and V that it sees to numbers.
Queries queries_of(const Stretch& span, int32_t from, int32_t count, int32_t window) {
  const int32_t row = span.row + from, part = first_seen(row, window) / PART_ROWS, end = parts_of(row + count);
  const bool apart = span.count <= MOST_QUERIES && end - part > 1;
  return {{span.tables, row, span.first + from, count}, part, end, apart, 0};
}

// Returns what multiplies the scores of a query.
float scale_at(const ct_attention& how, int32_t position) {
  if (how.beta == 0.0f) return how.scale;
  return how.scale * (1.0f + how.beta * std::log(1.0f + float(position / how.original)));
}

// Returns the part of a norm from number `number` on.
ct_norm from_number(const ct_norm& norm, int32_t number) {
  ct_norm part = norm;
  part.weight += number;
  return part;
}

}  // namespace

// Groups the rows of the stretches that are attended together, and cuts all work into tasks, the largest first.
void Group::share_attention(Plan& plan) {
  const std::vector<Stretch>& spans = space.stretches;
  const Shape& shape = shape_at(plan.layer);
  const int32_t window = layer_at(plan.layer).attention.window;
  const int32_t working = decoder.pool.working(), most_tasks = TASKS_A_THREAD * decoder.pool.size();
  int32_t single = 0, several = 0;  // heads and parts to divide, of single rows and of other stretches
  for (const Stretch& span : spans) {
    const Queries all = queries_of(span, 0, span.count, window);
    (span.count == 1 ? single : several) += span.count * shape.kv_heads * (all.apart ? all.parts() : 1);
  }
  // Group so many queries that every thread finds some. Adjacent heads are read together, unless that leaves threads
  // without work; all groups of heads have one size.
  const int32_t most = shape.together(), least = LEAST_QUERIES < most ? LEAST_QUERIES : most;
  const int32_t together = within(several / (TASKS_A_THREAD * working), least, most);
  const int32_t most_heads = shape.queries > 0 ? 1 : within(up(single, most_tasks), 1, shape.kv_heads);
  const int32_t side_by_side = up(shape.kv_heads, up(shape.kv_heads, most_heads));
  plan.queries.clear();
  plan.tasks.clear();
  plan.of_row.resize(size_t(count));
  size_t shared = 0, own = 0;
  for (bool alone : {false, true}) {
    for (const Stretch& span : spans) {
      if (alone != (span.count == 1)) continue;
      // The last rows see the most, so they come first.
      for (int32_t first = (span.count - 1) / together * together; first >= 0; first -= together) {
        const int32_t rows = span.count - first < together ? span.count - first : together;
        Queries some = queries_of(span, first, rows, window);
        some.sums = shared;
        const size_t sums = size_t(some.parts()) * size_t(rows * shape.groups);
        for (int32_t r = 0; r < rows; ++r) plan.of_row[size_t(some.first + r)] = int32_t(plan.queries.size());
        if (some.apart) {
          shared += sums * size_t(shape.kv_heads);
        } else if (const size_t needed = sums * size_t(alone ? side_by_side : 1); needed > own) {
          own = needed;
        }
        plan.queries.push_back(some);
        add_tasks(plan, int32_t(plan.queries.size()) - 1, alone ? side_by_side : 1);
      }
    }
  }
  space.sums.reserve(shared, sizes.dim);
  for (Bench& bench : space.benches) bench.sums.reserve(own, sizes.dim);
}

// The part with the newest row comes first: for a single row, the thread that attends to that part also writes the row.
void Group::add_tasks(Plan& plan, int32_t index, int32_t heads) {
  const Queries& some = plan.queries[size_t(index)];
  const int32_t kv_heads = shape_at(plan.layer).kv_heads;
  const int32_t pieces = some.apart ? some.parts() : 1, parts = some.apart ? 1 : some.parts();
  for (int32_t piece = pieces - 1; piece >= 0; --piece) {
    for (int32_t head = 0; head < kv_heads; head += heads) {
      const int32_t here = kv_heads - head < heads ? kv_heads - head : heads;
      plan.tasks.push_back({index, head, here, some.part + piece * parts, some.part + (piece + 1) * parts});
    }
  }
}

// Norms and rotates one head of the projection.
void Group::position_head(int32_t layer, int32_t r, int32_t which, float* out) const {
  const int32_t dim = shape_at(layer).dim;
  const float* from = heads(layer, r) + which * dim;
  const ct_attention& how = layer_at(layer).attention;
  const bool norms = how.head_norm.weight != nullptr && !how.together;
  if (norms && !how.later) {
    decoder.kernels.norm(from, from_number(how.head_norm, which * dim), dim, out);
  } else if (out != from) {
    std::memcpy(out, from, size_t(dim) * sizeof(float));
  }
  if (how.rotary != nullptr) {
    const float* turns = how.rotary + int64_t(space.given[size_t(r)].position) * how.rotated;
    decoder.kernels.rotate(out, turns, how.rotated, how.interleaved != 0);
  }
  if (norms && how.later) decoder.kernels.norm(out, from_number(how.head_norm, which * dim), dim, out);
}

const float* Group::values(int32_t layer, int32_t r, int32_t head, int32_t count, float* spare) const {
  const ct_attention& how = layer_at(layer).attention;
  const Shape& shape = shape_at(layer);
  const float* v = heads(layer, r) + shape.q_size + (how.v_is_k ? 0 : shape.kv_size) + head * shape.dim;
  if (how.v_norm.weight == nullptr) return v;
  for (int32_t i = 0; i < count * shape.dim; i += shape.dim) {
    decoder.kernels.norm(v + i, how.v_norm, shape.dim, spare + i);
  }
  return spare;
}

void Group::position(int32_t layer, Bench& bench) {
  const ct_kept& kept = layer_at(layer).kept;
  const int32_t type = decoder.cache.type;
  const ct_attention& how = layer_at(layer).attention;
  const Shape& shape = shape_at(layer);
  const int32_t kv_heads = how.shares_kv ? 0 : shape.kv_heads;
  auto from = [&](int32_t r) { return heads(layer, r); };
  claim_rows(count, shape.projected, from, [&](int32_t r) {
    const int64_t place = slot_at(layer, r) * decoder.slot_bytes(shape);
    uint8_t *keys = static_cast<uint8_t*>(kept.k) + place, *v = static_cast<uint8_t*>(kept.v) + place;
    float *q = heads(layer, r), *k = q + shape.q_size;
    // V first, because it may be k as it is now.
    if (kv_heads > 0) {
      const float* numbers = values(layer, r, 0, kv_heads, bench.query.as<float>());
      decoder.kernels.store(numbers, kv_heads, shape.dim, type, v, v + shape.kv_size);
    }
    if (how.together && how.head_norm.weight != nullptr) {
      decoder.kernels.norm(q, how.head_norm, shape.q_size, q);
      if (kv_heads > 0) decoder.kernels.norm(k, from_number(how.head_norm, shape.q_size), shape.kv_size, k);
    }
    for (int32_t h = 0; h < shape.q_heads + kv_heads; ++h) position_head(layer, r, h, q + h * shape.dim);
    if (kv_heads > 0) decoder.kernels.store(k, kv_heads, shape.dim, type, keys, keys + shape.kv_size);
  });
}

void Group::attention(int32_t layer, Bench& bench) {
  const std::vector<Task>& tasks = plan_of(layer).tasks;
  claim(int32_t(tasks.size()), [&](int32_t n) {
    const size_t later = size_t(n + decoder.pool.working());  // if all threads are as fast
    attend(layer, tasks[size_t(n)], later < tasks.size() ? &tasks[later] : nullptr, bench);
  });
}

// Returns the rows of a part of the context, from a KV head on.
CachedRows Group::cached_rows(int32_t layer, const Queries& some, int32_t head, int32_t part) const {
  const Shape& shape = shape_at(layer);
  const bool latent = shape.queries > 0;  // then all heads have the same rows
  const int64_t offset = latent ? 0 : int64_t(head) * shape.dim * decoder.number_bytes;
  const int32_t rows = some.row + some.count, start = part * PART_ROWS;
  const int32_t seen = first_seen(some.row, layer_at(layer).attention.window), before = seen > start ? seen - start : 0;
  const ct_kept& kept = layer_at(layer).kept;
  return {static_cast<const uint8_t*>(kept.k) + offset,
          static_cast<const uint8_t*>(latent ? kept.k : kept.v) + offset,
          some.tables.at(kept.table),
          decoder.slot_bytes(shape),
          shape.kv_size + 4 * head - offset,
          decoder.cache.type,
          decoder.cache.block_size,
          start + before / ATTEND_ROWS * ATTEND_ROWS,
          start + PART_ROWS < rows ? start + PART_ROWS : rows,
          before % ATTEND_ROWS};
}

void Group::attend(int32_t layer, const Task& task, const Task* next, Bench& bench) {
  const Queries& some = plan_of(layer).queries[size_t(task.queries)];
  const ct_attention& how = layer_at(layer).attention;
  const bool positioned = positions_first(layer_at(layer));
  const Kernels& kernels = decoder.kernels;
  const Shape& shape = shape_at(layer);
  const int32_t dim = shape.dim, v_dim = shape.v_dim, groups = shape.groups, queries = task.heads * groups;
  const int32_t first_head = task.head * groups;
  float* query = bench.query.as<float>();
  const float* sinks = how.sinks == nullptr ? nullptr : how.sinks + first_head;
  for (int32_t r = 0; r < some.count; ++r) {
    float* out = query + r * queries * dim;
    if (!positioned) {
      for (int32_t g = 0; g < queries; ++g) position_head(layer, 0, first_head + g, out + g * dim);
    } else {
      std::memcpy(out, query_heads(layer, some.first + r) + first_head * dim, size_t(queries * dim) * sizeof(float));
    }
    const float scale = scale_at(how, space.given[size_t(some.first + r)].position);
    for (int32_t i = 0; i < queries * dim; ++i) out[i] *= scale;
  }
  if (!positioned && !how.shares_kv && task.end == some.end) {
    float* keys = query + queries * dim;
    const float* v = values(layer, 0, task.head, task.heads, keys + task.heads * dim);
    for (int32_t h = 0; h < task.heads; ++h) position_head(layer, 0, shape.q_heads + task.head + h, keys + h * dim);
    const int64_t place = slot_at(layer, 0) * decoder.slot_bytes(shape);
    const int64_t numbers = int64_t(task.head) * dim * decoder.number_bytes, scales = shape.kv_size + 4 * task.head;
    const ct_kept& kept = layer_at(layer).kept;
    const int32_t type = decoder.cache.type;
    uint8_t *k_row = static_cast<uint8_t*>(kept.k) + place, *v_row = static_cast<uint8_t*>(kept.v) + place;
    kernels.store(keys, task.heads, dim, type, k_row + numbers, k_row + scales);
    kernels.store(v, task.heads, dim, type, v_row + numbers, v_row + scales);
  }
  const Sums all = some.apart ? space.sums.from(some.sums, v_dim) : bench.sums.from(0, v_dim);
  const int32_t kept_heads = some.apart ? shape.kv_heads : task.heads, kept_head = some.apart ? task.head : 0;
  for (int32_t part = task.part; part < task.end; ++part) {
    const CachedRows rows = cached_rows(layer, some, task.head, part);
    const int64_t place = (int64_t(part - some.part) * kept_heads + kept_head) * some.count * groups;
    const Sums sums{all.out + place * padded(v_dim), all.most + place, all.sum + place};
    if (some.count == 1 && shape.queries == 0) {
      kernels.attend({rows, query, task.heads, groups, dim, how.cap, bench.scores.as<float>(), sums.out, sums.most,
                      sums.sum});
      continue;
    }
    const bool last = part + 1 == task.end;
    CachedRows later = rows;
    if (!last) {
      later = cached_rows(layer, some, task.head, part + 1);
    } else if (next != nullptr) {
      later = cached_rows(layer, plan_of(layer).queries[size_t(next->queries)], next->head, next->part);
    }
    kernels.attend_chunk({rows, query, some.count * groups, groups, dim, v_dim, some.row + some.count - 1, how.window,
                          how.cap, bench.keys.as<float>(), bench.values.as<float>(), bench.scores.as<float>(), sums.out,
                          sums.most, sums.sum},
                         last && next == nullptr ? nullptr : &later);
  }
  for (int32_t r = 0; r < some.count && !some.apart; ++r) {
    combine(layer, some, r, all, sinks, kept_heads, task.heads, mixed(layer, some.first + r) + first_head * v_dim);
  }
}

// Combines the sums of `heads` KV heads of a row, stored among those of `kept_heads`, with the sinks of their queries.
void Group::combine(int32_t layer, const Queries& some, int32_t r, const Sums& sums, const float* sinks,
                    int32_t kept_heads, int32_t heads, float* out) const {
  const int32_t dim = shape_at(layer).v_dim, groups = shape_at(layer).groups, stride = kept_heads * some.count * groups;
  for (int32_t h = 0; h < heads; ++h) {
    const int64_t place = int64_t(h * some.count + r) * groups;
    const float* own = sinks == nullptr ? nullptr : sinks + h * groups;
    decoder.kernels.combine(sums.out + place * padded(dim), sums.most + place, sums.sum + place, own, some.parts(),
                            stride, groups, dim, out + h * groups * dim);
  }
}

}  // namespace chatterm
