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

template <typename T>
Buffer room(size_t count) {
  return Buffer(count * sizeof(T));
}

// Attention of some queries to each part of the context, before it is put together.
struct Sums {
  float* out;   // [parts][queries][padded(dim)]
  float* most;  // [parts][queries]
  float* sum;   // [parts][queries]
};

// Room for so many sums; it grows with the context.
class SumsRoom {
 public:
  // Throws std::bad_alloc.
  void reserve(size_t sums, int32_t dim) {
    if (sums <= size_) return;
    size_ = 0;
    out_ = room<float>(sums * size_t(padded(dim)));
    most_ = room<float>(sums);
    sum_ = room<float>(sums);
    size_ = sums;
  }
  Sums from(size_t first, int32_t dim) const {
    return {out_.as<float>() + first * size_t(padded(dim)), most_.as<float>() + first, sum_.as<float>() + first};
  }

 private:
  size_t size_ = 0;
  Buffer out_{0}, most_{0}, sum_{0};
};

// The forms of an activation of up to `n` numbers.
class Quantized {
 public:
  explicit Quantized(int32_t n);
  // Make the `forms` of x [n]; `x` must live as long as the result is used.
  const Activation& of(const Kernels& kernels, const float* x, int32_t n, int32_t forms);

 private:
  Buffer q_, scale_, low_, low_16_;
  Activation activation_;
};

}  // namespace chatterm
