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
      pair_(size_t(n) / 32 * 2 * sizeof(float)),
      fours_(size_t(n) / 32 * 8 * sizeof(int32_t)),
      wide_(size_t(n)),
      wide_scale_(size_t(n) / 256 * sizeof(float)),
      sums_(size_t(n) / 16 * sizeof(int16_t)),
      activation_{nullptr,          q_.as<int8_t>(),         pair_.as<float>(), fours_.as<int32_t>(),
                  wide_.as<int8_t>(), wide_scale_.as<float>(), sums_.as<int16_t>()} {}

const Activation& Quantized::of(const Kernels& kernels, const float* x, int32_t n, int32_t forms) {
  activation_.x = x;
  if (forms & FORM_32) kernels.quantize(x, n, activation_);
  if (forms & FORM_256) kernels.quantize_wide(x, n, activation_);
  return activation_;
}

}  // namespace chatterm
