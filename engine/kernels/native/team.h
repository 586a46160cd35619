// A pool as the C interface hands it out, and how the rows of a product are dealt to its threads.
#pragma once

#include "kernels.h"
#include "pool.h"

struct ct_pool {
  explicit ct_pool(int32_t threads) : pool(threads) {}
  chatterm::Pool pool;
};

namespace chatterm {

// Deals `rows` rows to a thread: first a share of its own, then small pieces of the rest, so that nobody waits for a
// thread that was interrupted or has a slow core; where one finds nothing left after its own share, shares become
// smaller. Pieces are multiples of `grain` rows. With own shares, the piece after the present one is known, so that its
// memory can be prefetched.
class Deal {
 public:
  // With `own`, threads have a share of their own. Without it they take every piece, of `grain` rows, only when they
  // are done with the one before: a piece taken ahead would be waited for at the end.
  Deal(Pool& pool, int32_t thread, int32_t rows, int32_t grain, bool own = true);
  // Returns the next rows first..end of this thread, and the first row after them, -1 if unknown; false when all are
  // dealt.
  bool next(int32_t& first, int32_t& end, int32_t& after);
  // Returns where a thread will begin.
  static int32_t begin(const Pool& pool, int32_t thread, int32_t rows, int32_t grain);

 private:
  void take();

  Pool& pool_;
  const int32_t rows_;
  const int32_t thread_;
  const bool ahead_;
  bool judges_;    // whether its own share is still to be judged
  int32_t own_;    // rows that every thread gets at first
  int32_t piece_;  // rows per piece after that
  int32_t first_, end_;
};

}  // namespace chatterm
