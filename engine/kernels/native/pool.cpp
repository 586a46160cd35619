#include "pool.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace chatterm {

namespace {

constexpr int SPINS_BEFORE_SLEEP = 20'000;  // some hundred microseconds: sampling between two steps takes as long
constexpr int SPINS_BEFORE_YIELD = 1'000;

constexpr int32_t MOST_OWN = PIECES * 3 / 4, LEAST_OWN = 2;
constexpr int32_t TRIAL = 32;  // products without a late thread before shares grow; a late one costs a few percent

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int32_t threads) : size_(threads), working_(threads), own_(MOST_OWN) {
  try {
    for (int32_t thread = 1; thread < threads; ++thread) threads_.emplace_back(&Pool::follow, this, thread);
  } catch (...) {
    end();
    throw;
  }
}

// Whether there is a job after the one `seen` that this thread works on.
bool Pool::has_job(int32_t thread, uint64_t seen) const {
  const uint64_t job = job_.load();
  return job != seen && thread < int32_t(job % JOB);
}

void Pool::announce(int32_t threads) {
  job_.store((job_.load(std::memory_order_relaxed) / JOB + 1) * JOB + uint64_t(threads));
  if (sleeping_.value.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
}

void Pool::end() {
  over_ = true;
  announce(size_);
  for (auto& thread : threads_) thread.join();
}

void Pool::run(Work work, void* given) {
  if (working_ == 1) {
    work(given, 0);
    barrier();
    return;
  }
  work_ = work;
  given_ = given;
  announce(working_);
  work(given, 0);
  barrier();
}

void Pool::follow(int32_t thread) {
  uint64_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < SPINS_BEFORE_SLEEP && !has_job(thread, seen); ++spin) relax();
    if (!has_job(thread, seen)) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.value.fetch_add(1);
      wake_.wait(lock, [&] { return has_job(thread, seen); });
      sleeping_.value.fetch_sub(1);
    }
    if (over_) return;
    seen = job_.load();  // it does not change before this thread has worked
    work_(given_, thread);
    barrier();
  }
}

// Called by the last thread at a barrier, while all others wait.
void Pool::adapt() {
  const bool late = late_.load(std::memory_order_relaxed), timely = timely_.load(std::memory_order_relaxed);
  if (!late && !timely) return;
  late_.store(false, std::memory_order_relaxed);
  timely_.store(false, std::memory_order_relaxed);
  if (!late && ++good_ < TRIAL) return;
  good_ = 0;
  if (late && own_ > LEAST_OWN) --own_;
  if (!late && own_ < MOST_OWN) ++own_;
}

void Pool::barrier() {
  const uint32_t part = part_.load(std::memory_order_relaxed);
  const int32_t others = working_ - 1;  // read before arriving: it may change after the last arrival
  if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) == others) {
    arrived_.value.store(0, std::memory_order_relaxed);
    claimed_[part & 1].value.store(0, std::memory_order_relaxed);
    adapt();
    part_.store(part + 1, std::memory_order_release);
    return;
  }
  for (int spin = 0; part_.load(std::memory_order_acquire) == part; ++spin) {
    if (spin < SPINS_BEFORE_YIELD) {
      relax();
    } else {
      std::this_thread::yield();  // another of our threads may be waiting for this core
    }
  }
}

}  // namespace chatterm
