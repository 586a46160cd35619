// Multiplies what stdin contains, with the portable kernels and two threads, and writes the products to stdout:
// test_compilers.py runs it where Python does not run. A job is a Job, the matrix, and fp32 x [count, columns].
#include <cstdio>
#include <vector>

#include "chatterm_native.h"

struct Job {
  int32_t type, rows, columns, row_bytes, count;
};

int main() {
  ct_pool* pool = ct_pool_create(2);
  for (Job job; std::fread(&job, sizeof job, 1, stdin) == 1;) {
    std::vector<uint8_t> data(size_t(job.rows) * job.row_bytes);
    std::vector<float> x(size_t(job.count) * job.columns), out(size_t(job.count) * job.rows);
    if (std::fread(data.data(), 1, data.size(), stdin) != data.size()) return 1;
    if (std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) return 1;
    const ct_matrix matrix{data.data(), job.row_bytes, job.type, job.rows, job.columns, CT_ROWS};
    if (!ct_products(pool, 0, &matrix, job.count, x.data(), out.data())) return 2;
    std::fwrite(out.data(), sizeof(float), out.size(), stdout);
  }
  ct_pool_destroy(pool);
}
