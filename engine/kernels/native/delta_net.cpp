// A head of a gated delta net: what it reads of the log, and what it makes of it.
#include <cmath>

#include "group.h"

namespace chatterm {

namespace {

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

void Group::walk_delta(int32_t layer, const Stretch& stretch, int32_t head, int32_t first, int32_t end, DeltaWalk& walk,
                       Bench& bench) const {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const RecurrenceShape shape(how);
  const int32_t keys = how.key_heads * how.key_dim, tail = how.width - 1, bytes = number_bytes(how.type);
  const int32_t key_head = how.alternating ? head % how.key_heads : head / (how.value_heads / how.key_heads);
  const int32_t q = key_head * how.key_dim, v = 2 * keys + head * how.value_dim;
  const int32_t b = shape.channels + head, a = b + shape.heads;
  const LogPiece pieces[] = {{q, q, how.key_dim}, {keys + q, keys + q, how.key_dim}, {v, v, how.value_dim},
                             {b + shape.out, b, 1}, {a + shape.out, a, 1}};
  uint8_t* log = bench.walk.log.as<uint8_t>();
  const int64_t row_bytes = int64_t(shape.row + 2) * bytes;
  read_log(layer, stretch, first - tail, end, pieces, 5, log);
  float *rows = bench.walk.rows.as<float>(), *decay = bench.walk.gates.as<float>(), *beta = decay + WALKED;
  const LogPiece* piece = pieces;
  for (int32_t at = 0; at < shape.row; at += piece++->size) {
    decoder.kernels.filter({log + at * bytes, row_bytes, how.filters + piece->logged, shape.channels, rows + at, shape.row,
                            how.type, how.width, end - first, piece->size});
  }
  for (int32_t i = 0; i < end - first; ++i) {
    float gates[2];
    dequantize_row(how.type, log + (tail + i) * row_bytes + shape.row * bytes, 2, gates);
    beta[i] = 1.0f / (1.0f + std::exp(-gates[0]));
    decay[i] = std::exp(how.decay[head] * softplus(gates[1] + how.dt_bias[head]));
  }
  walk.rows = rows;
  walk.decay = decay;
  walk.beta = beta;
  walk.y = bench.walk.y.as<float>();
  walk.columns = bench.walk.columns.as<float>();
  walk.count = end - first;
  walk.key_dim = how.key_dim;
  walk.value_dim = how.value_dim;
  decoder.kernels.walk_delta(walk);
  ct_feed silu{};
  silu.gain = 1.0f;
  for (int32_t row = std::max(first, stretch.row); row < end; ++row) {
    const int32_t r = stretch.first + row - stretch.row;
    const float* z = heads(layer, r) + shape.channels + head * how.value_dim;
    float* out = mixed(layer, r) + head * how.value_dim;
    decoder.kernels.norm(walk.y + (row - first) * how.value_dim, how.norm, how.value_dim, out);
    decoder.kernels.gate(silu, z, out, how.value_dim, out);
  }
}

}  // namespace chatterm
