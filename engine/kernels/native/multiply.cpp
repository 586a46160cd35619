#include "multiply.h"

#include <cstring>

namespace chatterm {

const uint8_t* row_of(const ct_linear& linear, int32_t row) {
  int32_t p = 0;
  for (; p < linear.count - 1 && row >= linear.parts[p].rows; ++p) row -= linear.parts[p].rows;
  return linear.parts[p].data + row * linear.parts[p].row_bytes;
}

namespace {

// The inputs from row `first` on, a multiple of TILE, up to TILE of them: at least as many as lie TILE side by side.
Inputs tile_of(const Inputs& x, int32_t first) {
  constexpr int32_t LEAST = TILE / 2 + 1;
  const int32_t left = x.rows - first;
  const int64_t n = int64_t(first) * x.columns;
  return {nullptr, nullptr, x.q + n / 4, x.scale + n / 32, x.low + n / 32, x.low_16 + n / 16,
          left > TILE ? TILE : left < LEAST ? LEAST : left, x.columns, TILE};
}

}  // namespace

Multiplier::Multiplier(const Kernels& kernels, int32_t columns, int32_t rows)
    : kernels_(kernels),
      digits_(size_t(columns) * PANEL),
      scale_(room<float>(size_t(columns / 16 * PANEL))),
      low_(room<float>(size_t(columns / 16 * PANEL))),
      piece_(room<float>(up_to(rows, TILE) * PANEL)),
      panel_{digits_.as<uint32_t>(), scale_.as<float>(), low_.as<float>(), 0, 0} {}

void Multiplier::multiply(const ct_linear& linear, int32_t first, int32_t end, const Inputs& x, float* out,
                          int32_t stride, const uint8_t* next) {
  int32_t start = 0;
  for (int32_t p = 0; p < linear.count; ++p) {
    const ct_matrix& part = linear.parts[p];
    const int32_t from = first > start ? first : start;
    const int32_t to = end < start + part.rows ? end : start + part.rows;
    if (from < to && (few(x.rows) || form_of(part.type) & FORM_FLOAT)) {
      const uint8_t* after = to < end ? linear.parts[p + 1].data : next;
      kernels_.product_of(part.type, part.storage == CT_INTERLEAVED)({part.data + int64_t(from - start) * part.row_bytes, size_t(part.row_bytes),
                                      to - from, part.columns, after},
                                     x, out + from - first, stride);
    } else if (from < to && kernels_.by_tiles(part.type, x.rows)) {
      const Rows rows{part.data + int64_t(from - start) * part.row_bytes, size_t(part.row_bytes), to - from, part.columns,
                      to < end ? linear.parts[p + 1].data : next};
      const Product product = kernels_.product_of(part.type, part.storage == CT_INTERLEAVED);
      for (int32_t r = 0; r < x.rows; r += TILE) product(rows, tile_of(x, r), out + r * stride + from - first, stride);
    } else {
      for (int32_t i = from; i < to; i += PANEL) {
        const int32_t count = to - i < PANEL ? to - i : PANEL;
        multiply_panel(part, i - start, count, x, out + i - first, stride, i - first + PANEL <= stride);
      }
    }
    start += part.rows;
  }
  for (int32_t r = 0; r < x.rows && linear.bias != nullptr; ++r) {
    for (int32_t i = first; i < end; ++i) out[r * stride + i - first] += linear.bias[i];
  }
}

// Missing rows of a panel may be written if later ones overwrite them, but not past the end of a stride.
void Multiplier::multiply_panel(const ct_matrix& part, int32_t first, int32_t count, const Inputs& x, float* out,
                                int32_t stride, bool fits) {
  kernels_.unpack(part, first, count, panel_);
  if (fits) return kernels_.multiply_panel(panel_, x, out, stride);
  float* piece = piece_.as<float>();
  kernels_.multiply_panel(panel_, x, piece, PANEL);
  for (int32_t r = 0; r < x.rows; ++r) {
    std::memcpy(out + r * stride, piece + r * PANEL, size_t(count) * sizeof(float));
  }
}

void multiply_share(Pool& pool, Multiplier& multiplier, const ct_linear& linear, const Inputs& x, int32_t thread,
                    const uint8_t* later, float* tile, float* out, float scale) {
  const int32_t outputs = rows_of(linear), piece = piece_of(x.rows);
  Deal deal(pool, thread, outputs, GRAIN, few(x.rows));
  for (int32_t first, end, after; deal.next(first, end, after);) {
    for (int32_t from = first; from < end; from += piece) {
      const int32_t to = from + piece < end ? from + piece : end;
      const uint8_t* next = to < end ? row_of(linear, to) : after < 0 ? later : row_of(linear, after);
      float* here = out + from;
      for (int32_t r = 0; r < x.rows; ++r) __builtin_prefetch(here + int64_t(r) * outputs, 1);
      multiplier.multiply(linear, from, to, x, tile, piece, next);
      for (int32_t r = 0; r < x.rows; ++r, here += outputs) {
        const float* found = tile + r * piece;
        if (scale != 0.0f) {
          for (int32_t i = 0; i < to - from; ++i) here[i] += scale * found[i];
        } else {
          std::memcpy(here, found, size_t(to - from) * sizeof(float));
        }
      }
    }
  }
}

}  // namespace chatterm
