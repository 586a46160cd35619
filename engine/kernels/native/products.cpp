// Single products and single rows: what tests and benchmarks ask for.
#include <new>

#include "multiply.h"
#include "team.h"

using namespace chatterm;

namespace {

struct Products {
  Pool& pool;
  const Kernels& kernels;
  const ct_linear linear;
  const float* given;
  Inputs x;
  std::vector<Multiplier>& multipliers;
  std::vector<Buffer>& tiles;
  float* out;
};

void multiply(void* given, int32_t thread) {
  auto& job = *static_cast<Products*>(given);
  const int32_t columns = job.x.columns;
  for (int32_t r = job.pool.claim(); r < job.x.rows && forms_of(job.linear) & FORM_INT8; r = job.pool.claim()) {
    job.kernels.quantize(job.given + int64_t(r) * columns, r, 0, columns, job.x);
  }
  job.pool.barrier();
  multiply_share(job.pool, job.multipliers[size_t(thread)], job.linear, job.x, thread, row_of(job.linear, 0),
                 job.tiles[size_t(thread)].as<float>(), job.out, false);
}

}  // namespace

int32_t ct_products(ct_pool* pool, int32_t variant, const ct_matrix* matrix, int32_t count, const float* x,
                    float* out) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr || count < 1 || !is_sound(*matrix)) return 0;
  try {
    InputsRoom room(count, matrix->columns);
    std::vector<Multiplier> multipliers;
    std::vector<Buffer> tiles;
    for (int32_t thread = 0; thread < pool->pool.size(); ++thread) {
      multipliers.emplace_back(*kernels, matrix->columns, count);
      tiles.emplace_back((up_to(count, TILE) * PANEL + PIECE) * sizeof(float));
    }
    Products job{pool->pool, *kernels, {{*matrix}, nullptr, 1, 0}, x, room.of(count, matrix->columns), multipliers, tiles, out};
    job.x.x = x;
    pool->pool.run(multiply, &job);
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
