// Single products, single rows and plain reading: what tests and benchmarks ask for.
#include <new>

#include "scratch.h"
#include "team.h"
#include "variants.h"

using namespace chatterm;

namespace {

struct OneProduct {
  Pool& pool;
  const ct_matrix& matrix;
  Product product;
  const Activation& x;
  float* out;
};

void multiply_share(void* given, int32_t thread) {
  auto& job = *static_cast<OneProduct*>(given);
  Deal deal(job.pool, thread, job.matrix.rows, 4);
  const size_t bytes = size_t(job.matrix.row_bytes);
  for (int32_t first, end, after; deal.next(first, end, after);) {
    const uint8_t* next = job.matrix.data + size_t(after < 0 ? 0 : after) * bytes;
    job.product({job.matrix.data + size_t(first) * bytes, bytes, end - first, job.matrix.columns, next}, job.x,
                job.out + first);
  }
}

struct Reading {
  const Kernels& kernels;
  const uint8_t* data;
  int64_t bytes;
  int64_t threads;
  std::atomic<uint64_t> total;
};

void read_share(void* given, int32_t thread) {
  auto& job = *static_cast<Reading*>(given);
  const int64_t first = job.bytes * thread / job.threads, end = job.bytes * (thread + 1) / job.threads;
  job.total += job.kernels.read(job.data + first, end - first);
}

}  // namespace

int32_t ct_product(ct_pool* pool, int32_t variant, const ct_matrix* matrix, const float* x, float* out) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr || !is_sound(*matrix)) return 0;
  try {
    Quantized quantized(matrix->columns);
    const Activation& given = quantized.of(*kernels, x, matrix->columns, form_of(matrix->type));
    OneProduct job{pool->pool, *matrix, kernels->product_of(matrix->type), given, out};
    pool->pool.run(multiply_share, &job);
    return 1;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

int32_t ct_dequantize_row(const ct_matrix* matrix, int32_t row, float* out) {
  if (!is_sound(*matrix) || row < 0 || row >= matrix->rows) return 0;
  dequantize_row(matrix->type, matrix->data + row * matrix->row_bytes, matrix->columns, out);
  return 1;
}

uint64_t ct_read(ct_pool* pool, const uint8_t* data, int64_t bytes) {
  Reading job{*kernels_of(ct_best_variant()), data, bytes, pool->pool.size(), {0}};
  pool->pool.run(read_share, &job);
  return job.total;
}
