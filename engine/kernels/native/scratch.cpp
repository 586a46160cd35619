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

InputsRoom::InputsRoom(int32_t rows, int32_t columns)
    : q_(up_to(rows, TILE) * size_t(columns)),
      scale_(room<float>(up_to(rows, TILE) * size_t(columns / 32))),
      low_(room<float>(up_to(rows, TILE) * size_t(columns / 32))),
      low_16_(room<float>(up_to(rows, TILE) * size_t(columns / 16))) {}

Inputs InputsRoom::of(int32_t rows, int32_t columns) const {
  const int32_t wide = rows < 3 ? rows : rows < 5 ? 4 : TILE;
  return {nullptr, q_.as<uint32_t>(), scale_.as<float>(), low_.as<float>(), low_16_.as<float>(), rows, columns, wide};
}

}  // namespace chatterm
