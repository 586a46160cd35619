#include "interleave.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace chatterm {

namespace {

constexpr size_t HUGE_PAGE = size_t(2) << 20;
constexpr size_t LINE = 64;

size_t bytes_of(const ct_matrix& matrix) { return size_t(matrix.rows) * size_t(matrix.row_bytes); }

size_t with_gap(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Gives back the whole pages of a mapped file; they are read again if still needed.
void give_back(const uint8_t* data, size_t bytes) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (uintptr_t(data) + page - 1) / page * page, end = (uintptr_t(data) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

template <int TYPE>
void interleave_panel(const uint8_t* rows, size_t row_bytes, uint8_t* out) {
  using Order = InterleavedBlock<TYPE>;
  for (size_t at = 0; at < row_bytes; at += Order::BYTES, out += PANEL * Order::BYTES) {
    for (int r = 0; r < PANEL; ++r) {
      const uint8_t* block = rows + size_t(r) * row_bytes + at;
      std::memcpy(out + Order::REST * r, block, Order::REST);
      for (int w = 0; w < Order::WORDS; ++w) {
        const int from = Order::REST + 4 * w;
        std::memcpy(out + Order::word(from) + 4 * r, block + from, 4);
      }
    }
  }
}

struct Copying {
  Pool& pool;
  const ct_matrix& matrix;
  int32_t first, count;  // panels
  uint8_t* out;          // for all panels
};

void copy_some(void* given, int32_t) {
  const auto& job = *static_cast<Copying*>(given);
  const size_t bytes = size_t(job.matrix.row_bytes) * PANEL;
  for (int32_t n = job.pool.claim(); n < job.count; n = job.pool.claim()) {
    const int32_t panel = job.first + n;
    interleave(job.matrix, panel, 1, job.out + size_t(panel) * bytes);
  }
}

}  // namespace

bool can_interleave(const ct_matrix& matrix) {
  return is_small(matrix.type) && matrix.storage != CT_INTERLEAVED && matrix.rows % PANEL == 0;
}

void interleave(const ct_matrix& matrix, int32_t first, int32_t count, uint8_t* out) {
  const size_t row = size_t(matrix.row_bytes), bytes = row * PANEL;
  by_small_blocks(matrix.type, [&](auto type) {
    for (int32_t n = 0; n < count; ++n) {
      interleave_panel<type.value>(matrix.data + size_t(first + n) * bytes, row, out + size_t(n) * bytes);
    }
  });
}

Interleaver::~Interleaver() {
  if (memory_ != nullptr) munmap(memory_, size_);
}

void Interleaver::add(ct_linear& linear) {
  for (int32_t p = 0; p < linear.count; ++p) {
    if (linear.parts[p].rows % PANEL != 0) return;
  }
  for (int32_t p = 0; p < linear.count; ++p) {
    ct_matrix& part = linear.parts[p];
    if (part.storage != CT_MAPPED || !can_interleave(part)) continue;
    matrices_.push_back(&part);
    left_ += int64_t(bytes_of(part));
  }
}

bool Interleaver::reserve() {
  if (memory_ != nullptr) return true;
  copied_.reserve(matrices_.size());
  size_t size = HUGE_PAGE;  // the most that is lost before the first huge page begins
  for (const ct_matrix* matrix : matrices_) size += with_gap(bytes_of(*matrix));
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return false;
  memory_ = static_cast<uint8_t*>(found);
  size_ = size;
  at_ = memory_ + (HUGE_PAGE - uintptr_t(memory_) % HUGE_PAGE) % HUGE_PAGE;
#ifdef MADV_HUGEPAGE
  madvise(at_, size_t(memory_ + size_ - at_), MADV_HUGEPAGE);  // where there are none, small pages are used
#endif
  return true;
}

bool Interleaver::go_on(Pool& pool, int64_t bytes) {
  if (left_ == 0) return true;
  if (!reserve()) return false;
  while (bytes > 0 && next_ < matrices_.size()) {
    ct_matrix& matrix = *matrices_[next_];
    const int64_t panel = matrix.row_bytes * PANEL;
    const int32_t rest = matrix.rows / PANEL - panel_;
    const int32_t count = int32_t(std::min<int64_t>(rest, (bytes + panel - 1) / panel));
    Copying job{pool, matrix, panel_, count, at_};
    pool.run(copy_some, &job);
    panel_ += count;
    bytes -= count * panel;
    left_ -= count * panel;
    if (count == rest) finish(matrix);
  }
  if (next_ == matrices_.size()) {
    for (const auto& [data, size] : copied_) give_back(data, size);  // pages that were read with their neighbours
  }
  return true;
}

void Interleaver::finish(ct_matrix& matrix) {
  const size_t bytes = bytes_of(matrix);
  give_back(matrix.data, bytes);
  copied_.emplace_back(matrix.data, bytes);
  matrix.data = at_;
  matrix.storage = CT_INTERLEAVED;
  at_ += with_gap(bytes);
  panel_ = 0;
  ++next_;
}

}  // namespace chatterm
