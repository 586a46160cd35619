// How long products of two sizes, in turns, take on cores of different speed, relative to the ideal: test_dealing.py runs
// it with the numbers of rows and the speeds. Threads take turns by a clock that counts rows, so that nothing is timed.
// A speed ON:OFF is that of a core that another program has for OFF after every ON.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "team.h"

using namespace chatterm;

constexpr int PRODUCTS = 64, MEASURED = 32;
constexpr double DONE = std::numeric_limits<double>::infinity();

struct Core {
  double speed, on, off;

  explicit Core(const char* given) : speed(1.0), on(DONE), off(0.0) {
    if (std::sscanf(given, "%lf:%lf", &on, &off) < 2) speed = std::atof(given), on = DONE;
  }
  double average() const { return off > 0.0 ? on / (on + off) : speed; }
  // When rows that are begun at `clock` are done.
  double after(double clock, double rows) const {
    if (off == 0.0) return clock + rows / speed;
    const double at = std::fmod(clock, on + off), begun = at < on ? at : 0.0;
    const double pauses = std::floor((begun + rows) / on);
    return clock + (at < on ? 0.0 : on + off - at) + rows + pauses * off;
  }
};

struct Machine {
  ct_pool pool;
  int32_t rows;
  std::vector<Core> cores;
  std::vector<double> clock;
  std::mutex mutex;
  std::condition_variable moved;

  // Waits until no other thread is earlier.
  void wait(std::unique_lock<std::mutex>& lock, size_t thread) {
    moved.wait(lock, [&] { return size_t(std::min_element(clock.begin(), clock.end()) - clock.begin()) == thread; });
  }
};

double ended;  // when the slowest thread of a product was done, in rows of a core of speed 1

void multiply(void* given, int32_t thread) {
  auto& machine = *static_cast<Machine*>(given);
  const size_t self = size_t(thread);
  Deal deal(machine.pool.pool, thread, machine.rows, 16);
  std::unique_lock<std::mutex> lock(machine.mutex);
  for (int32_t first, end, after;;) {
    machine.wait(lock, self);
    if (!deal.next(first, end, after)) break;
    machine.clock[self] = machine.cores[self].after(machine.clock[self], end - first);
    machine.moved.notify_all();
  }
  ended = std::max(ended, machine.clock[self]);
  machine.clock[self] = DONE;
  machine.moved.notify_all();
}

int main(int count, char** given) {
  const int32_t rows[] = {std::atoi(given[1]), std::atoi(given[2])};
  Machine machine{ct_pool(count - 3), 0, {}, {}, {}, {}};
  double sum = 0.0, all[] = {0.0, 0.0};
  for (int i = 3; i < count; ++i) machine.cores.emplace_back(given[i]), sum += machine.cores.back().average();
  for (int product = 0; product < PRODUCTS; ++product) {
    machine.rows = rows[product % 2];
    const double began = ended;
    machine.clock.assign(machine.cores.size(), began);
    machine.pool.pool.run(multiply, &machine);
    if (product >= PRODUCTS - MEASURED) all[product % 2] += (ended - began) * sum / machine.rows;
  }
  std::printf("%.3f %.3f\n", all[0] / (MEASURED / 2), all[1] / (MEASURED / 2));
}
