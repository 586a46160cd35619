#include "team.h"

#include <new>
#include <system_error>

namespace chatterm {

namespace {

constexpr int32_t MOST_THREADS = 256;

constexpr int32_t PIECES = 16;  // of a thread's part: few enough that taking one costs nothing

}  // namespace

Deal::Deal(Pool& pool, int32_t thread, int32_t rows, int32_t grain) : pool_(pool), thread_(thread), rows_(rows) {
  const int32_t share = rows / pool.size();
  own_ = pool.size() == 1 ? rows : share * 3 / 4 / grain * grain;
  piece_ = share / PIECES > grain ? share / PIECES / grain * grain : grain;
}

bool Deal::next(int32_t& first, int32_t& end) {
  if (!begun_) {
    begun_ = true;
    if (own_ > 0) {
      first = thread_ * own_;
      end = first + own_;
      return true;
    }
  }
  if (pool_.size() == 1 && own_ > 0) return false;
  first = pool_.size() * own_ + pool_.claim() * piece_;
  if (first >= rows_) return false;
  end = first + piece_ < rows_ ? first + piece_ : rows_;
  return true;
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

int32_t ct_pool_threads(const ct_pool* pool) { return pool->pool.size(); }

void ct_pool_destroy(ct_pool* pool) { delete pool; }
