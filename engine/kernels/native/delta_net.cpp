// A head of a gated delta net: its gates, and what becomes of its results.
#include <cmath>

#include "group.h"

namespace chatterm {

RowGates gates_of_delta_net(const ct_recurrence& how, int32_t head, const float* logged) {
  const float b = logged[0], a = logged[1];
  return {std::exp(how.decay[head] * softplus(a + how.dt_bias[head])), 1.0f / (1.0f + std::exp(-b))};
}

void Group::finish_head(int32_t layer, int32_t head, int32_t r, const float* y) const {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const int32_t at = head * how.value_dim;
  const float* z = heads(layer, r) + RecurrenceShape(how).z + at;
  float* out = mixed(layer, r) + at;
  ct_feed silu{};
  silu.gain = 1.0f;
  decoder.kernels.norm(y, how.norm, how.value_dim, out);
  decoder.kernels.gate(silu, z, out, how.value_dim, out);
}

}  // namespace chatterm
