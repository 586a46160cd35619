// Products of a linear layer with any number of rows of inputs.
#pragma once

#include "scratch.h"
#include "team.h"

namespace chatterm {

constexpr int32_t PIECE = 2048;  // outputs of a product of few rows at once: they stay in the cache

constexpr int32_t GRAIN = 16;  // outputs in a cache line, so that threads do not write to the same one

// Up to TILE rows of inputs are multiplied with the rows of a weight as stored; more rows with panels of them, or TILE
// at a time (`Kernels::by_tiles`).
inline bool few(int32_t rows) { return rows <= TILE; }

// Returns how many outputs to multiply at once.
inline int32_t piece_of(int32_t rows) { return few(rows) ? PIECE / rows / PANEL * PANEL : PANEL; }

inline int32_t forms_of(const ct_linear& linear) {
  int32_t forms = 0;
  for (int32_t p = 0; p < linear.count; ++p) forms |= form_of(linear.parts[p].type);
  return forms;
}

inline int32_t rows_of(const ct_linear& linear) {
  int32_t rows = 0;
  for (int32_t p = 0; p < linear.count; ++p) rows += linear.parts[p].rows;
  return rows;
}

const uint8_t* row_of(const ct_linear& linear, int32_t row);

// Multiplies up to `rows` rows of up to `columns` columns, for one thread.
class Multiplier {
 public:
  Multiplier(const Kernels& kernels, int32_t columns, int32_t rows);
  // out[r * stride + i - first] = row r of the inputs times row i of a layer, bias included, for i from `first` to
  // `end`. The thread reads `next` after them. With more than TILE rows, their number is rounded up to TILE, and
  // everything within a stride is overwritten.
  void multiply(const ct_linear& linear, int32_t first, int32_t end, const Inputs& x, float* out, int32_t stride,
                const uint8_t* next);

 private:
  void multiply_panel(const ct_matrix& part, int32_t first, int32_t count, const Inputs& x, float* out, int32_t stride,
                      bool fits);

  const Kernels& kernels_;
  Buffer digits_, scale_, low_, piece_;
  Panel panel_;
};

// Computes a thread's share of out[r][i] = row r of the inputs times row i of a layer; with `scale`, of out[r][i] +=
// scale times that. `tile` has room for the outputs computed at once; the thread reads `later` next.
void multiply_share(Pool& pool, Multiplier& multiplier, const ct_linear& linear, const Inputs& x, int32_t thread,
                    const uint8_t* later, float* tile, float* out, float scale);

}  // namespace chatterm
