// Several rows of activations and some rows of a weight, as chunk.cpp multiplies them.
#pragma once

#include "scratch.h"

namespace chatterm {

// Memory for a grid of up to `rows` rows.
class GridRoom {
 public:
  GridRoom(int32_t rows, int32_t columns);

 private:
  Buffer q_, scale_, low_, low_16_;

 public:
  Grid grid;
};

// Memory for a panel of up to `columns` columns, and for its products with up to `rows` rows.
class PanelRoom {
 public:
  PanelRoom(int32_t columns, int32_t rows);
  // out[rows, rounded up to TILE][PANEL] = the grid times rows first..end (at most PANEL) of a layer, bias included
  void multiply(const Kernels& kernels, const ct_linear& linear, int32_t first, int32_t end, const Grid& grid,
                int32_t rows, float* out);

 private:
  Buffer digits_, scale_, low_, piece_;
  Panel panel_;
};

}  // namespace chatterm
