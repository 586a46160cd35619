// Multiplies what stdin contains, with the named variant and two threads, and writes the products to stdout:
// test_compilers.py runs it where Python does not run. A job is a Job, the matrix, and fp32 x [count, columns]; its
// products are followed by those with as many rows as can be interleaved. Without a name, it lists what works; "crc32"
// prints the checksum of stdin instead.
#include <cstdio>
#include <cstring>
#include <vector>

#include "chatterm_native.h"

struct Job {
  int32_t type, rows, columns, row_bytes, count;
};

int main(int argc, char** argv) {
  int32_t variant = -1;
  for (int32_t i = 0; i < ct_variants(); ++i) {
    if (argc < 2 && ct_variant_works(i)) std::puts(ct_variant_name(i));
    if (argc > 1 && std::strcmp(argv[1], ct_variant_name(i)) == 0) variant = i;
  }
  if (argc < 2) return 0;
  if (std::strcmp(argv[1], "crc32") == 0) {
    std::vector<uint8_t> data(1 << 20);
    data.resize(std::fread(data.data(), 1, data.size(), stdin));
    std::printf("%u\n", ct_crc32_works() ? ct_crc32(data.data(), int64_t(data.size())) : 0u);
    return 0;
  }
  ct_pool* pool = ct_pool_create(2);
  for (Job job; std::fread(&job, sizeof job, 1, stdin) == 1;) {
    std::vector<uint8_t> data(size_t(job.rows) * job.row_bytes), copy(data.size());
    std::vector<float> x(size_t(job.count) * job.columns), out(size_t(job.count) * job.rows);
    if (std::fread(data.data(), 1, data.size(), stdin) != data.size()) return 1;
    if (std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) return 1;
    ct_matrix matrix{data.data(), job.row_bytes, job.type, job.rows, job.columns, CT_ROWS};
    if (!ct_products(pool, variant, &matrix, job.count, x.data(), out.data())) return 2;
    std::fwrite(out.data(), sizeof(float), out.size(), stdout);
    matrix.rows = job.rows / 16 * 16;
    if (!ct_interleave(&matrix, copy.data())) continue;
    const ct_matrix interleaved{copy.data(), job.row_bytes, job.type, matrix.rows, job.columns, CT_INTERLEAVED};
    if (!ct_products(pool, variant, &interleaved, job.count, x.data(), out.data())) continue;
    std::fwrite(out.data(), sizeof(float), size_t(job.count) * matrix.rows, stdout);
  }
  ct_pool_destroy(pool);
}
