// Mamba-2: the gates of a head, and what becomes of the results of all heads.
#include <algorithm>
#include <cmath>

#include "group.h"

namespace chatterm {

RowGates gates_of_mamba(const ct_recurrence& how, int32_t head, const float* logged) {
  const float step = std::min(std::max(softplus(*logged + how.dt_bias[head]), how.least), how.most);
  return {std::exp(step * how.decay[head]), step};
}

void Group::gate_heads(int32_t layer, int32_t r, float* out) const {
  const ct_recurrence& how = layer_at(layer).recurrence;
  const RecurrenceShape shape(how);
  const int32_t size = shape.out / how.key_heads;
  const float *y = mixed(layer, r), *z = heads(layer, r) + shape.z;
  auto norm = [&](const float* given) {
    ct_norm own = how.norm;
    for (int32_t at = 0; at < shape.out; at += size, own.weight += size) {
      decoder.kernels.norm(given + at, own, size, out + at);
    }
  };
  const bool has_norm = how.norm.weight != nullptr, before = has_norm && how.norms_first;
  ct_feed silu{};
  silu.gain = 1.0f;
  if (before) norm(y);
  decoder.kernels.gate(silu, z, before ? out : y, shape.out, out);
  if (has_norm && !before) norm(out);
}

}  // namespace chatterm
