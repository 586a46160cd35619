#include "team.h"

#include <new>
#include <system_error>

namespace chatterm {

namespace {

constexpr int32_t MOST_THREADS = 256;

constexpr int32_t TELLING = 3;  // with fewer pieces per thread to claim, even a thread that is in time may find none

int32_t own_rows(const Pool& pool, int32_t rows, int32_t grain) {
  return pool.working() == 1 ? rows : rows / pool.working() * pool.own() / PIECES / grain * grain;
}

}  // namespace

Deal::Deal(Pool& pool, int32_t thread, int32_t rows, int32_t grain, bool own)
    : pool_(pool),
      rows_(rows),
      thread_(thread),
      ahead_(own),
      own_(own ? own_rows(pool, rows, grain) : 0),
      first_(thread * own_),
      end_(first_ + own_) {
  const int32_t share = own ? rows / pool.working() : 0;
  piece_ = share / PIECES > grain ? share / PIECES / grain * grain : grain;
  judges_ = own_ > 0 && share - own_ >= TELLING * piece_;
  if (ahead_ && own_ == 0) take();
}

void Deal::take() {
  first_ = pool_.working() * own_ + pool_.claim() * piece_;
  end_ = first_ + piece_ < rows_ ? first_ + piece_ : rows_;
}

bool Deal::next(int32_t& first, int32_t& end, int32_t& after) {
  if (!ahead_) take();
  if (first_ >= rows_) return false;
  first = first_;
  end = end_;
  if (ahead_) take();
  after = ahead_ && first_ < rows_ ? first_ : -1;
  if (judges_ && first != thread_ * own_) {  // it has done its own share, and took a piece before that
    judges_ = false;
    pool_.judge(after < 0);
  }
  return true;
}

int32_t Deal::begin(const Pool& pool, int32_t thread, int32_t rows, int32_t grain) {
  return thread * own_rows(pool, rows, grain);
}

}  // namespace chatterm

using namespace chatterm;

ct_pool* ct_pool_create(int32_t threads) {
  if (threads < 1 || threads > MOST_THREADS) return nullptr;
  try {
    return new ct_pool(threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void ct_pool_working(ct_pool* pool, int32_t threads) { pool->pool.set_working(threads); }

void ct_pool_destroy(ct_pool* pool) { delete pool; }
