// Single products, single rows and plain reading: what tests and benchmarks ask for.
#include <new>

#include "chunk.h"
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
  Deal deal(job.pool, thread, job.matrix.rows, PANEL);
  const size_t bytes = size_t(job.matrix.row_bytes);
  for (int32_t first, end, after; deal.next(first, end, after);) {
    const uint8_t* next = job.matrix.data + size_t(after < 0 ? 0 : after) * bytes;
    job.product({job.matrix.data + size_t(first) * bytes, bytes, end - first, job.matrix.columns, next}, job.x,
                job.out + first);
  }
}

struct ManyProducts {
  Pool& pool;
  const Kernels& kernels;
  const ct_linear linear;
  const float* x;
  int32_t count;
  GridRoom& room;
  std::vector<PanelRoom>& panels;
  std::vector<Buffer>& tiles;
  float* out;
};

void multiply_panels(void* given, int32_t thread) {
  auto& job = *static_cast<ManyProducts*>(given);
  const ct_matrix& matrix = job.linear.parts[0];
  for (int32_t r = job.pool.claim(); r < job.count; r = job.pool.claim()) {
    job.kernels.quantize_part(job.x + int64_t(r) * matrix.columns, matrix.columns, r, 0, matrix.columns, job.room.grid);
  }
  job.pool.barrier();
  const int32_t panels = (matrix.rows + PANEL - 1) / PANEL;
  float* tile = job.tiles[size_t(thread)].as<float>();
  for (int32_t panel = job.pool.claim(); panel < panels; panel = job.pool.claim()) {
    const int32_t first = panel * PANEL, end = first + PANEL < matrix.rows ? first + PANEL : matrix.rows;
    job.panels[size_t(thread)].multiply(job.kernels, job.linear, first, end, job.room.grid, job.count, tile);
    for (int32_t r = 0; r < job.count; ++r) {
      for (int32_t i = first; i < end; ++i) job.out[int64_t(r) * matrix.rows + i] = tile[r * PANEL + i - first];
    }
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

int32_t ct_products(ct_pool* pool, int32_t variant, const ct_matrix* matrix, int32_t count, const float* x,
                    float* out) {
  const Kernels* kernels = kernels_of(variant);
  if (kernels == nullptr || count < 0 || !is_sound(*matrix) || form_of(matrix->type) == FORM_FLOAT) return 0;
  try {
    GridRoom room(count, matrix->columns);
    std::vector<PanelRoom> panels;
    std::vector<Buffer> tiles;
    for (int32_t thread = 0; thread < pool->pool.size(); ++thread) {
      panels.emplace_back(matrix->columns, 0);
      tiles.emplace_back(size_t(count + TILE) * PANEL * sizeof(float));
    }
    ManyProducts job{pool->pool, *kernels, {{*matrix}, nullptr, 1, 0}, x, count, room, panels, tiles, out};
    pool->pool.run(multiply_panels, &job);
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
  Reading job{*kernels_of(ct_best_variant()), data, bytes, pool->pool.working(), {0}};
  pool->pool.run(read_share, &job);
  return job.total;
}
