// A fixed team of threads that spins for a moment, then sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace chatterm {

// An equal part of a product for each thread is this many pieces: few enough that the cost of taking one is negligible.
constexpr int32_t PIECES = 16;

// The work of one thread of the team; the caller of `run` is thread 0.
using Work = void (*)(void* given, int32_t thread);

class Pool {
 public:
  explicit Pool(int32_t threads);
  ~Pool() { end(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int32_t size() const { return size_; }
  // How many threads work on jobs, the caller of `run` included.
  int32_t working() const { return working_; }
  // Between two jobs: sets how many threads do the next ones, while the others sleep.
  void set_working(int32_t threads) { working_ = threads < 1 ? 1 : threads < size_ ? threads : size_; }
  // Makes every working thread do `work` once, and returns when all are done.
  void run(Work work, void* given);
  // Within `work`: waits until every thread is here. The last one resets the claim counter of this part, for the next
  // part but one.
  void barrier();
  // Within `work`: returns the next piece of the part between two barriers, from 0 on.
  int32_t claim() { return claimed_[part_.load(std::memory_order_relaxed) & 1].value.fetch_add(1, std::memory_order_relaxed); }
  // How many of PIECES pieces a thread gets as its own, without claiming them, in the part between two barriers.
  int32_t own() const { return own_; }
  // Within `work`: tells whether nothing was left to claim when a thread was done with its own pieces. If any thread says
  // so, own() is smaller in the next part; if none does for a while, it grows.
  void judge(bool late) { (late ? late_ : timely_).store(true, std::memory_order_relaxed); }

 private:
  struct alignas(64) Counter {
    std::atomic<int32_t> value{0};
  };

  // A job's number, and how many threads work on it: one that sleeps through jobs must not take part in a later one.
  static constexpr uint64_t JOB = uint64_t(1) << 16;

  bool has_job(int32_t thread, uint64_t seen) const;
  void announce(int32_t threads);
  void follow(int32_t thread);
  void end();
  void adapt();

  const int32_t size_;
  int32_t working_;
  int32_t own_;
  int32_t good_ = 0;  // products since own_ changed
  Work work_ = nullptr;
  void* given_ = nullptr;
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<uint32_t> part_{0};
  Counter arrived_;
  Counter claimed_[2];
  Counter sleeping_;
  alignas(64) std::atomic<bool> late_{false};
  std::atomic<bool> timely_{false};
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace chatterm
