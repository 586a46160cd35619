// Quantised weights whose rows are interleaved: what a product reads of PANEL rows lies side by side, so that nothing has
// to be gathered, and memory is read in its order.
//
// PANEL rows take as many bytes as before. Block after block come first the bytes that are no whole word (a scale of two
// bytes or one) of each row, then the words: word 0 of each row, word 1 of each, and so on. Blocks of 256 numbers stay as
// they are: what they have to gather is little beside their other work.
#pragma once

#include <utility>
#include <vector>

#include "formats.h"
#include "kernels.h"
#include "pool.h"

namespace chatterm {
namespace {

template <int TYPE>
struct InterleavedBlock {
  static constexpr int BYTES = shape_of(TYPE).bytes;
  static constexpr int REST = BYTES % 4;  // bytes that are no whole word, the first ones of a block
  static constexpr int WORDS = BYTES / 4;
  // Where the word of the first row lies that is `at` bytes into its block.
  static constexpr int word(int at) { return PANEL * at; }
};

}  // namespace

// Whether a matrix can be interleaved: whether it has small blocks, and whole panels.
bool can_interleave(const ct_matrix& matrix);
// `count` panels from panel `first` on of a matrix whose rows lie one after the other, to `out`.
void interleave(const ct_matrix& matrix, int32_t first, int32_t count, uint8_t* out);

// Copies of weights that lie in mapped files, in memory of huge pages where the system has some.
class Interleaver {
 public:
  Interleaver() = default;
  ~Interleaver();
  Interleaver(const Interleaver&) = delete;
  Interleaver& operator=(const Interleaver&) = delete;

  // Its matrices that can be interleaved are, some day; they must stay where they are. A part of a layer begins with a
  // whole panel, or none of them is.
  void add(ct_linear& linear);
  int64_t left() const { return left_; }
  // Copies about `bytes` more. False when memory is short. Throws std::bad_alloc.
  bool go_on(Pool& pool, int64_t bytes);

 private:
  bool reserve();
  void finish(ct_matrix& matrix);

  std::vector<ct_matrix*> matrices_;
  size_t next_ = 0;                                        // of them
  std::vector<std::pair<const uint8_t*, size_t>> copied_;  // where those before it lay
  int64_t left_ = 0;
  int32_t panel_ = 0;  // of the one that is being copied
  uint8_t* memory_ = nullptr;
  size_t size_ = 0;
  uint8_t* at_ = nullptr;  // where its copy begins
};

}  // namespace chatterm
