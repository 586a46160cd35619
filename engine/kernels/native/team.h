// A pool as the C interface hands it out, and how the rows of a product are dealt to its threads.
#pragma once

#include "kernels.h"
#include "pool.h"

struct ct_pool {
  explicit ct_pool(int32_t threads) : pool(threads) {}
  chatterm::Pool pool;
};

namespace chatterm {

// Which of `rows` a thread computes: first a large share of its own, then small pieces of what is left, so that a
// thread that was interrupted is not waited for. Pieces are multiples of `grain` rows. There the piece after the present
// one is known, so that its memory can be asked for.
class Deal {
 public:
  // `own` is whether threads have a share of their own; else they take every piece, of `grain` rows, when they are done
  // with the one before: what was taken ahead of that would be waited for in the end.
  Deal(Pool& pool, int32_t thread, int32_t rows, int32_t grain, bool own = true);
  // The next rows first..end of this thread, and the first row after them, -1 for none that is known; false when all are
  // dealt.
  bool next(int32_t& first, int32_t& end, int32_t& after);
  // Where a thread will begin.
  static int32_t begin(const Pool& pool, int32_t thread, int32_t rows, int32_t grain);

 private:
  void take();

  Pool& pool_;
  const int32_t rows_;
  const bool ahead_;
  int32_t own_;    // rows that every thread gets at first
  int32_t piece_;  // rows of what is dealt after that
  int32_t first_, end_;
};

}  // namespace chatterm
