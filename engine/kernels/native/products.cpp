// Products by themselves, for a network that is otherwise computed elsewhere, and functions for tests and benchmarks.
#include <memory>
#include <new>

#include "interleave.h"
#include "multiply.h"
#include "team.h"

using namespace chatterm;

struct ct_multiplier {
  ct_multiplier(Pool& team, const Kernels& chosen, int32_t widest, int32_t most)
      : pool(team), kernels(chosen), columns(widest), rows(most), room(most, widest) {
    for (int32_t thread = 0; thread < pool.size(); ++thread) {
      multipliers.emplace_back(kernels, widest, most);
      tiles.emplace_back((up_to(most, TILE) * PANEL + PIECE) * sizeof(float));
    }
  }

  Pool& pool;
  const Kernels& kernels;
  const int32_t columns, rows;
  InputsRoom room;
  std::vector<Multiplier> multipliers;
  std::vector<Buffer> tiles;
};

namespace {

struct Products {
  ct_multiplier& means;
  const ct_linear& linear;
  Inputs x;
  float* out;
};

void multiply(void* given, int32_t thread) {
  auto& job = *static_cast<Products*>(given);
  ct_multiplier& means = job.means;
  const int32_t columns = job.x.columns;
  for (int32_t r = means.pool.claim(); r < job.x.rows; r = means.pool.claim()) {
    means.kernels.round(job.x.x + int64_t(r) * columns, forms_of(job.linear), r, 0, columns, job.x);
  }
  means.pool.barrier();
  multiply_share(means.pool, means.multipliers[size_t(thread)], job.linear, job.x, thread, row_of(job.linear, 0),
                 means.tiles[size_t(thread)].as<float>(), job.out, 0.0f);
}

bool fits(const ct_linear& linear, int32_t widest, const Kernels& kernels) {
  if (linear.count < 1 || linear.count > CT_MOST_PARTS) return false;
  for (int32_t p = 0; p < linear.count; ++p) {
    const ct_matrix& part = linear.parts[p];
    if (part.storage == CT_INTERLEAVED && !kernels.interleaves) return false;
    if (!is_sound(part) || part.columns != linear.parts[0].columns || part.columns > widest) return false;
  }
  return true;
}

}  // namespace

ct_multiplier* ct_multiplier_create(ct_pool* pool, int32_t variant, int32_t columns, int32_t rows) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr || columns < 1 || rows < 1) return nullptr;
  try {
    return new ct_multiplier(pool->pool, *kernels, columns, rows);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void ct_multiplier_destroy(ct_multiplier* multiplier) { delete multiplier; }

int32_t ct_multiplier_run(ct_multiplier* multiplier, const ct_linear* linear, int32_t count, const float* x, float* out) {
  if (count < 1 || !fits(*linear, multiplier->columns, multiplier->kernels)) return 0;
  const int32_t columns = linear->parts[0].columns, outputs = rows_of(*linear);
  for (int32_t done = 0; done < count; done += multiplier->rows) {
    const int32_t rows = count - done < multiplier->rows ? count - done : multiplier->rows;
    Products job{*multiplier, *linear, multiplier->room.of(rows, columns), out + int64_t(done) * outputs};
    job.x.x = x + int64_t(done) * columns;
    multiplier->pool.run(multiply, &job);
  }
  return 1;
}

int32_t ct_products(ct_pool* pool, int32_t variant, const ct_matrix* matrix, int32_t count, const float* x,
                    float* out) {
  if (count < 1 || !is_sound(*matrix)) return 0;
  std::unique_ptr<ct_multiplier> multiplier(ct_multiplier_create(pool, variant, matrix->columns, count));
  const ct_linear linear{{*matrix}, nullptr, 1, 0};
  return multiplier != nullptr && ct_multiplier_run(multiplier.get(), &linear, count, x, out);
}

int32_t ct_interleave(const ct_matrix* matrix, uint8_t* out) {
  if (!is_sound(*matrix) || !can_interleave(*matrix)) return 0;
  interleave(*matrix, 0, matrix->rows / PANEL, out);
  return 1;
}

int32_t ct_dequantize_row(const ct_matrix* matrix, int32_t row, float* out) {
  if (!is_sound(*matrix) || row < 0 || row >= matrix->rows) return 0;
  dequantize_row(matrix->type, matrix->data + row * matrix->row_bytes, matrix->columns, out);
  return 1;
}
