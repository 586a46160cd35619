// Short convolutions, in place of attention. Rows see the inputs before them as the cache keeps them, whether they were
// computed earlier or in the same step, so their bits do not depend on how a sequence is split.
#include <cstring>

#include "group.h"

namespace chatterm {

Inputs Group::convolve(int32_t index, int32_t forms, Bench& bench) {
  const ct_layer& layer = layer_at(index);
  const ct_convolution& how = layer.convolution;
  const int32_t size = how.size, row_bytes = size * chatterm::number_bytes(how.type);
  uint8_t* kept = static_cast<uint8_t*>(layer.kept.k);
  auto projected = [&](int32_t r) { return heads(index, r); };
  claim_rows(count, 3 * size, projected, [&](int32_t r) {
    const float* b = projected(r);
    float* x = projected(r) + 2 * size;
    for (int32_t i = 0; i < size; ++i) x[i] *= b[i];
    uint8_t* own = kept + slot_at(index, r) * row_bytes;
    decoder.kernels.store(x, 1, size, how.type, own, nullptr);
  });
  decoder.pool.barrier();
  return inputs(count, size, forms, space.mixed.as<float>(), bench, projected, [&](int32_t r, float* out) {
    const Row& row = space.given[size_t(r)];
    const float *c = projected(r) + size, *x = c + size;
    if (how.bias != nullptr) {
      std::memcpy(out, how.bias, size_t(size) * sizeof(float));
    } else {
      std::memset(out, 0, size_t(size) * sizeof(float));
    }
    for (int32_t back = how.width - 1; back > 0; --back) {
      if (back > row.row) continue;
      const uint8_t* earlier = kept + decoder.slot_at(layer, row.tables, row.row - back) * row_bytes;
      decoder.kernels.add_filtered(earlier, how.type, how.filters + int64_t(how.width - 1 - back) * size, size, out);
    }
    const uint8_t* own = static_cast<const uint8_t*>(static_cast<const void*>(x));
    decoder.kernels.add_filtered(own, CT_F32, how.filters + int64_t(how.width - 1) * size, size, out);
    for (int32_t i = 0; i < size; ++i) out[i] *= c[i];
    return out;
  });
}

}  // namespace chatterm
