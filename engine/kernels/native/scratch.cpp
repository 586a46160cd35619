#include "scratch.h"

#include <cstring>
#include <new>

namespace chatterm {

namespace {
constexpr size_t LINE = 64;
}

Buffer::Buffer(size_t bytes) {
  const size_t size = (bytes / LINE + 2) * LINE;
  void* memory = std::aligned_alloc(LINE, size);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, size);
  memory_.reset(static_cast<unsigned char*>(memory));
}

Quantized::Quantized(int32_t n)
    : q_(size_t(n)),
      scale_(size_t(n) / 32 * sizeof(float)),
      low_(size_t(n) / 32 * sizeof(float)),
      low_16_(size_t(n) / 16 * sizeof(float)),
      activation_{nullptr, q_.as<int8_t>(), scale_.as<float>(), low_.as<float>(), low_16_.as<float>()} {}

const Activation& Quantized::of(const Kernels& kernels, const float* x, int32_t n, int32_t forms) {
  activation_.x = x;
  if (forms & FORM_INT8) kernels.quantize(x, n, activation_);
  return activation_;
}

}  // namespace chatterm
