// Memory for activations, aligned to cache lines so that threads do not write to each other's.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"

namespace chatterm {

class Buffer {
 public:
  // Zeros. Throws std::bad_alloc.
  explicit Buffer(size_t bytes);
  template <typename T>
  T* as() const {
    return static_cast<T*>(static_cast<void*>(memory_.get()));
  }

 private:
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };
  std::unique_ptr<unsigned char, Free> memory_;
};

// The forms of an activation of up to `n` numbers.
class Quantized {
 public:
  explicit Quantized(int32_t n);
  // Make the `forms` of x [n]; `x` must live as long as the result is used.
  const Activation& of(const Kernels& kernels, const float* x, int32_t n, int32_t forms);

 private:
  Buffer q_, pair_, fours_, wide_, wide_scale_, sums_;
  Activation activation_;
};

}  // namespace chatterm
