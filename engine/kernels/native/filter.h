// The filters before recurrences. The plain twin is models/reference/causal_convolution.py. Part of kernels_impl.h.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

void filter(const Filtering& f) {
  by_type(f.type, [&](auto as) {
    for (int32_t row = 0; row < f.count; ++row) {
      const uint8_t* given = f.rows + row * f.row_bytes;
      for (int32_t i = 0; i < f.numbers; i += 8) {
        Floats sum = f.bias == nullptr ? Floats{} : load(f.bias + i);
        for (int32_t w = 0; w < f.width; ++w) {
          sum += load(f.filters + w * f.channels + i) * decltype(as)::eight(given + w * f.row_bytes + i * as.BYTES);
        }
        store(f.out + row * f.stride + i, sum / (1.0f + exponential(-sum)));
      }
    }
  });
}

}  // namespace
}  // namespace chatterm
