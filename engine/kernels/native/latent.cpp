// Latent attention (ct_latent). Each head multiplies its own part of k_b and v_b, so these are products by themselves.
//
//   keep       norm, RoPE, write             heads -> cache
//   q_b        norm, products                heads -> mixed (only if there is one)
//   k_b        products, RoPE                mixed or heads -> queries
//   attention  as elsewhere                  queries, cache -> mixed, or sums of parts
//   v_b        combination of sums, products mixed, sums -> heads
#include <algorithm>
#include <cstring>

#include "group.h"

namespace chatterm {

namespace {

constexpr int32_t OF_HEAD = 128;  // outputs of a head that a thread takes at once

}  // namespace

template <typename Give, typename Take>
void Group::multiply_heads(const ct_linear& linear, int32_t heads, Bench& bench, Give give, Take take) {
  const int32_t columns = linear.parts[0].columns, outputs = rows_of(linear) / heads, forms = forms_of(linear);
  const int32_t parts = (outputs + OF_HEAD - 1) / OF_HEAD, piece = std::min(piece_of(count), OF_HEAD);
  float *numbers = bench.numbers.as<float>(), *tile = bench.tile.as<float>();
  Inputs given = bench.of_head.of(count, columns);
  given.x = numbers;
  claim(heads * parts, [&](int32_t n) {
    const int32_t head = n / parts, start = n % parts * OF_HEAD, end = std::min(start + OF_HEAD, outputs);
    const int32_t later = std::min(n + decoder.pool.working(), heads * parts - 1);  // if all threads are as fast
    for (int32_t r = 0; r < count; ++r) {
      float* row = numbers + int64_t(r) * columns;
      give(r, head, start, row);
      decoder.kernels.round(row, forms, r, 0, columns, given);
    }
    for (int32_t from = start; from < end; from += piece) {
      const int32_t to = std::min(from + piece, end), first = head * outputs;
      const int32_t next = to < end ? first + to : later / parts * outputs + later % parts * OF_HEAD;
      bench.multiplier.multiply(linear, first + from, first + to, given, tile, piece, row_of(linear, next));
      for (int32_t r = 0; r < count; ++r) {
        std::memcpy(take(r, head) + from, tile + r * piece, size_t(to - from) * sizeof(float));
      }
    }
  });
  decoder.pool.barrier();
}

void Group::keep_latents(int32_t index, Bench& bench) {
  const ct_layer& layer = layer_at(index);
  const ct_attention& how = layer.attention;
  const Shape& shape = shape_at(index);
  auto latent = [&](int32_t r) { return heads(index, r) + shape.projected - shape.dim; };
  claim_rows(count, shape.dim, latent, [&](int32_t r) {
    const Row& row = space.given[size_t(r)];
    float *from = latent(r), *kept = bench.query.as<float>();
    decoder.kernels.norm(from, layer.latent.kv_norm, shape.v_dim, kept);
    std::memcpy(kept + shape.v_dim, from + shape.v_dim, size_t(layer.latent.rope) * sizeof(float));
    if (how.rotary != nullptr) {
      decoder.kernels.rotate(kept + shape.v_dim, how.rotary + int64_t(row.position) * how.rotated, how.rotated,
                             how.interleaved != 0);
    }
    uint8_t* place = static_cast<uint8_t*>(layer.kept.k) + slot_at(index, r) * decoder.slot_bytes(shape);
    decoder.kernels.store(kept, 1, shape.dim, decoder.cache.type, place, nullptr);
  });
  decoder.pool.barrier();
}

const float* Group::unabsorbed(int32_t index, int32_t thread, int32_t& stride) {
  const ct_latent& latent = layer_at(index).latent;
  const int32_t rank = q_rank_in(latent);
  stride = rank > 0 ? rows_of(latent.q_b) : shape_at(index).projected;
  if (rank == 0) return heads(index, 0);
  Bench& bench = space.benches[size_t(thread)];
  auto from = [&](int32_t r) { return heads(index, r); };
  const Inputs given = inputs(count, rank, forms_of(latent.q_b), space.queries.as<float>(), bench, from,
                              [&](int32_t r, float* spare) {
                                decoder.kernels.norm(from(r), latent.q_norm, rank, spare);
                                return spare;
                              });
  float* found = space.mixed.as<float>();
  multiply(latent.q_b, given, row_of(latent.k_b, 0), found, 0.0f, thread);
  return found;
}

Inputs Group::attend_to_latents(int32_t index, int32_t forms, int32_t thread) {
  const ct_layer& layer = layer_at(index);
  const ct_latent& latent = layer.latent;
  const ct_attention& how = layer.attention;
  const Shape& shape = shape_at(index);
  const Plan& plan = plan_of(index);
  Bench& bench = space.benches[size_t(thread)];
  keep_latents(index, bench);
  int32_t stride = 0;
  const float* given = unabsorbed(index, thread, stride);
  auto absorbed = [&](int32_t r, int32_t head) { return query_heads(index, r) + head * shape.dim; };
  auto give_query = [&](int32_t r, int32_t head, int32_t first, float* out) {
    const float* query = given + int64_t(r) * stride + head * (latent.nope + latent.rope);
    std::memcpy(out, query, size_t(latent.nope) * sizeof(float));
    if (first > 0) return;
    float* last = absorbed(r, head) + shape.v_dim;
    std::memcpy(last, query + latent.nope, size_t(latent.rope) * sizeof(float));
    if (how.rotary == nullptr) return;
    const float* turns = how.rotary + int64_t(space.given[size_t(r)].position) * how.rotated;
    decoder.kernels.rotate(last, turns, how.rotated, how.interleaved != 0);
  };
  multiply_heads(latent.k_b, shape.q_heads, bench, give_query, absorbed);
  attention(index, bench);
  decoder.pool.barrier();
  float* values = space.heads.as<float>();
  auto value = [&](int32_t r, int32_t head) { return values + int64_t(r) * shape.out + head * latent.values; };
  auto give_mixed = [&](int32_t r, int32_t head, int32_t, float* out) {
    const Queries& some = plan.queries[size_t(plan.of_row[size_t(r)])];
    if (!some.apart) {
      std::memcpy(out, mixed(index, r) + head * shape.v_dim, size_t(shape.v_dim) * sizeof(float));
      return;
    }
    const Sums sums = space.sums.from(some.sums, shape.v_dim);
    const int32_t groups = shape.groups, kv_head = head / groups;
    const int64_t place = int64_t(kv_head * some.count + r - some.first) * groups + head % groups;
    decoder.kernels.combine(sums.out + place * padded(shape.v_dim), sums.most + place, sums.sum + place, nullptr,
                            some.parts(), shape.kv_heads * some.count * groups, 1, shape.v_dim, out);
  };
  multiply_heads(latent.v_b, shape.q_heads, bench, give_mixed, value);
  auto from = [&](int32_t r) { return value(r, 0); };
  return inputs(count, shape.out, forms, values, bench, from, [&](int32_t r, float*) { return from(r); });
}

}  // namespace chatterm
