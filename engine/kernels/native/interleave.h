// Quantised weights with interleaved rows: the data that a product reads of PANEL rows is contiguous, so nothing has to
// be gathered, and memory is read in order.
//
// PANEL rows take as many bytes as before. For each block in turn come first the leading bytes of each row that form no
// whole word (a scale of two bytes or one), then the words: word 0 of each row, word 1 of each, and so on. Blocks of
// 256 numbers are not interleaved: gathering is cheap beside their other work.
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
  static constexpr int REST = BYTES % 4;  // leading bytes of a block that form no whole word
  static constexpr int WORDS = BYTES / 4;
  // Where the first row's word lies that is `at` bytes into its block.
  static constexpr int word(int at) { return PANEL * at; }
};

}  // namespace

// Whether a matrix can be interleaved: it must have small blocks and whole panels.
bool can_interleave(const ct_matrix& matrix);
// Interleaves `count` panels, from panel `first` on, of a matrix whose rows lie one after the other, into `out`.
void interleave(const ct_matrix& matrix, int32_t first, int32_t count, uint8_t* out);

// Copies of weights in mapped files, in huge pages if the system has them.
class Interleaver {
 public:
  Interleaver() = default;
  ~Interleaver();
  Interleaver(const Interleaver&) = delete;
  Interleaver& operator=(const Interleaver&) = delete;

  // Schedules the layer's matrices for interleaving if possible; they must stay in place. Every part of the layer must
  // begin with a whole panel, or none is interleaved.
  void add(ct_linear& linear);
  int64_t left() const { return left_; }
  // Copies about `bytes` more. Returns false if memory is short. Throws std::bad_alloc.
  bool go_on(Pool& pool, int64_t bytes);

 private:
  bool reserve();
  void finish(ct_matrix& matrix);

  std::vector<ct_matrix*> matrices_;
  size_t next_ = 0;                                        // index of the matrix that is being copied
  std::vector<std::pair<const uint8_t*, size_t>> copied_;  // where the matrices before it were mapped
  int64_t left_ = 0;
  int32_t panel_ = 0;  // the next panel of the matrix that is being copied
  uint8_t* memory_ = nullptr;
  size_t size_ = 0;
  uint8_t* at_ = nullptr;  // where its copy begins
};

}  // namespace chatterm
