// Memory for activations, aligned to cache lines so that threads do not write to each other's lines.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"

namespace chatterm {

inline size_t up_to(int32_t count, int32_t unit) { return size_t((count + unit - 1) / unit * unit); }

class Buffer {
 public:
  // Zeroed memory. Throws std::bad_alloc.
  explicit Buffer(size_t bytes) {
    const size_t size = (bytes / LINE + 2) * LINE;
    void* memory = std::aligned_alloc(LINE, size);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, size);
    memory_.reset(static_cast<unsigned char*>(memory));
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(static_cast<void*>(memory_.get()));
  }

 private:
  static constexpr size_t LINE = 64;
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };
  std::unique_ptr<unsigned char, Free> memory_;
};

template <typename T>
Buffer room(size_t count) {
  return Buffer(count * sizeof(T));
}

// The attention of some queries to each part of the context, before the parts are combined.
struct Sums {
  float* out;   // [sums][padded(dim)]
  float* most;  // [sums]
  float* sum;   // [sums]
};

// Memory for sums; it grows with the context.
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

// How many rows of inputs there is room for.
inline int32_t with_padding(int32_t rows) { return int32_t(up_to(rows, wide_of(rows))); }

// Memory for up to `rows` rows of inputs of up to `columns` columns, except the inputs of plain weights.
class InputsRoom {
 public:
  InputsRoom(int32_t rows, int32_t columns)
      : halves_(room<uint16_t>(size_t(rows) * size_t(columns))),
        q_(up_to(rows, TILE) * size_t(columns)),
        scale_(room<float>(up_to(rows, TILE) * size_t(columns / 32))),
        low_(room<float>(up_to(rows, TILE) * size_t(columns / 32))),
        low_16_(room<float>(up_to(rows, TILE) * size_t(columns / 16))) {}
  // The inputs from number `first` on, a multiple of 32 if they are rounded.
  Inputs of(int32_t rows, int32_t columns, size_t first = 0) const {
    return {nullptr,
            halves_.as<uint16_t>() + first,
            q_.as<uint32_t>() + first / 4,
            scale_.as<float>() + first / 32,
            low_.as<float>() + first / 32,
            low_16_.as<float>() + first / 16,
            rows,
            columns,
            wide_of(rows)};
  }

 private:
  Buffer halves_, q_, scale_, low_, low_16_;
};

}  // namespace chatterm
