// The activations between gate_up and down. Part of kernels_impl.h.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace chatterm {
namespace {

struct Silu {
  Floats of(Floats x) const { return x / (1.0f + exponential(-x)); }
};

struct SteepSilu {
  float gain;
  Floats of(Floats x) const { return x / (1.0f + exponential(x * -gain)); }
};

struct Gelu {
  Floats of(Floats x) const {
    float numbers[8];
    store(numbers, x);
    for (float& number : numbers) number *= 0.5f * (1.0f + __builtin_erff(number * 0.70710678f));
    return load(numbers);
  }
};

// x / 2 * (1 + tanh(u)) equals x / (1 + exp(-2 u)).
struct GeluTanh {
  Floats of(Floats x) const { return x / (1.0f + exponential((x + 0.044715f * x * x * x) * -1.59576912f)); }
};

struct Relu {
  Floats of(Floats x) const { return choose(x < 0.0f, Floats{}, x); }
};

struct SquaredRelu {
  Floats of(Floats x) const { return choose(x < 0.0f, Floats{}, x * x); }
};

struct Xielu {
  float alpha_p, alpha_n;
  Floats of(Floats x) const {
    const Floats below = (exponential(choose(x < -1e-6f, x, splat(-1e-6f))) - 1.0f - x) * alpha_n;
    return choose(x > 0.0f, alpha_p * x * x, below) + 0.5f * x;
  }
};

// How up combines with the activation: not at all, as a factor, or as a factor that is clamped and shifted (gate is
// capped, too).
struct NoUp {
  Floats gate(Floats x) const { return x; }
  Floats times(Floats x, const float*) const { return x; }
};

struct PlainUp {
  Floats gate(Floats x) const { return x; }
  Floats times(Floats x, const float* up) const { return x * load(up); }
};

// NaN stays NaN.
struct ClampedUp {
  float limit, offset;
  Floats gate(Floats x) const { return choose(x > limit, splat(limit), x); }
  Floats times(Floats x, const float* up) const {
    const Floats y = gate(load(up));
    return x * (choose(y < -limit, splat(-limit), y) + offset);
  }
};

template <typename Activation, typename Up>
void gate_as(const Activation& activation, const Up& other, const float* given, const float* up, int32_t n, float* out) {
  auto eight = [&](const float* gate, const float* beside) {
    return other.times(activation.of(other.gate(load(gate))), beside);
  };
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) store(out + i, eight(given + i, up + i));
  if (i == n) return;
  float last[8] = {}, beside[8] = {};
  for (int32_t k = 0; k < n - i; ++k) last[k] = given[i + k], beside[k] = up[i + k];
  store(last, eight(last, beside));
  for (int32_t k = 0; k < n - i; ++k) out[i + k] = last[k];
}

template <typename Activation>
void gate_by(const Activation& activation, const ct_feed& feed, const float* given, const float* up, int32_t n,
             float* out) {
  const float limit = feed.limit > 0.0f ? feed.limit : __builtin_inff();
  if (up == nullptr) return gate_as(activation, NoUp{}, given, given, n, out);
  if (feed.limit == 0.0f && feed.up_offset == 0.0f) return gate_as(activation, PlainUp{}, given, up, n, out);
  gate_as(activation, ClampedUp{limit, feed.up_offset}, given, up, n, out);
}

struct Sigmoid {
  Floats of(Floats x) const { return 1.0f / (1.0f + exponential(-x)); }
};

void open(const float* gates, int32_t gate, int32_t dim, int32_t heads, const float* x, float* out) {
  if (gate > 1) return gate_as(Sigmoid{}, PlainUp{}, gates, x, heads * dim, out);
  for (int32_t h = 0; h < heads; ++h) {
    const float factor = Sigmoid{}.of(splat(gates[h]))[0];
    for (int32_t i = h * dim; i < (h + 1) * dim; ++i) out[i] = x[i] * factor;
  }
}

void gate(const ct_feed& feed, const float* given, const float* up, int32_t n, float* out) {
  if (feed.gain != 1.0f) return gate_by(SteepSilu{feed.gain}, feed, given, up, n, out);
  switch (feed.activation) {
    case CT_GELU:
      return gate_by(Gelu{}, feed, given, up, n, out);
    case CT_GELU_TANH:
      return gate_by(GeluTanh{}, feed, given, up, n, out);
    case CT_RELU:
      return gate_by(Relu{}, feed, given, up, n, out);
    case CT_RELU2:
      return gate_by(SquaredRelu{}, feed, given, up, n, out);
    case CT_XIELU:
      return gate_by(Xielu{feed.alpha_p, feed.alpha_n}, feed, given, up, n, out);
    default:
      return gate_by(Silu{}, feed, given, up, n, out);
  }
}

}  // namespace
}  // namespace chatterm
