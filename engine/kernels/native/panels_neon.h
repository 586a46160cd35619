// Panels for ARM with dot products, or with products of int8 matrices if the compiler targets them. Part of panels.h.
#pragma once

namespace chatterm {
namespace {

constexpr int AT_ONCE = 4;        // rows of inputs that are multiplied with SIDES * LANES rows of a panel
constexpr int SIDES = 8 / LANES;  // as many as there are registers for

// dots[r][h] = the digits from `digits` on times those of the inputs from `q` on, over FOURS * 4 columns.
template <int FOURS>
inline void dots_of_panel(const uint32_t* digits, const uint32_t* q, LaneInts (*dots)[SIDES]) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  LaneInts sums[AT_ONCE / 2][SIDES][2] = {};
  CT_UNROLL
  for (int i = 0; i < FOURS; i += 2) {
    LaneBits x[AT_ONCE / 2];
    CT_UNROLL
    for (int p = 0; p < AT_ONCE / 2; ++p) x[p] = load_bits(q + word_of(i, 2 * p, TILE));
    CT_UNROLL
    for (int h = 0; h < SIDES; ++h) {
      CT_UNROLL
      for (int m = 0; m < 2; ++m) {
        const LaneBits w = load_bits(digits + word_of(i, h * LANES + 2 * m, PANEL));
        CT_UNROLL
        for (int p = 0; p < AT_ONCE / 2; ++p) sums[p][h][m] = add_matrix(sums[p][h][m], x[p], w);
      }
    }
  }
  CT_UNROLL
  for (int r = 0; r < AT_ONCE; r += 2) {
    CT_UNROLL
    for (int h = 0; h < SIDES; ++h) part_sums(sums[r / 2][h][0], sums[r / 2][h][1], dots[r][h], dots[r + 1][h]);
  }
#else
  CT_UNROLL
  for (int r = 0; r < AT_ONCE; ++r) {
    CT_UNROLL
    for (int h = 0; h < SIDES; ++h) dots[r][h] = LaneInts{};
  }
  CT_UNROLL
  for (int i = 0; i < FOURS; ++i) {
    const LaneBits x = load_bits(q + i * TILE);
    CT_UNROLL
    for (int h = 0; h < SIDES; ++h) {
      const LaneBits w = load_bits(digits + i * PANEL + h * LANES);
      CT_UNROLL
      for (int r = 0; r < AT_ONCE; ++r) dots[r][h] = add_dot(dots[r][h], w, x, r);
    }
  }
#endif
}

// Multiplies SIDES * LANES rows of a panel, from row `side` on, with AT_ONCE rows of inputs, from `row` on.
template <int GROUP, bool SIGNED>
void multiply_groups(const Panel& panel, const InputTile& x, int side, int row, float* out, int32_t stride) {
  constexpr int FOURS = GROUP / 4;
  LaneFloats sums[AT_ONCE][SIDES] = {};
  for (int32_t g = 0; g < panel.columns / GROUP; ++g) {
    LaneInts dots[AT_ONCE][SIDES];
    dots_of_panel<FOURS>(panel.digits + g * FOURS * PANEL + word_of(0, side, PANEL),
                         x.q + g * FOURS * TILE + word_of(0, row, TILE), dots);
    const float* steps = x.scale + g * GROUP / 32 * TILE + row;
    const float* lows = x.low + g * TILE + row;
    CT_UNROLL
    for (int h = 0; h < SIDES; ++h) {
      const LaneFloats scale = load_as<LaneFloats>(panel.scale + g * PANEL + side + h * LANES);
      const LaneFloats low = load_as<LaneFloats>(panel.low + g * PANEL + side + h * LANES);
      CT_UNROLL
      for (int r = 0; r < AT_ONCE; ++r) {
        sums[r][h] = fused(to_floats(dots[r][h]), scale * steps[r], sums[r][h]);
        if (!SIGNED) sums[r][h] = fused(low, spread(lows[r]), sums[r][h]);
      }
    }
  }
  CT_UNROLL
  for (int r = 0; r < AT_ONCE; ++r) {
    CT_UNROLL
    for (int h = 0; h < SIDES; ++h) store_as(out + r * stride + side + h * LANES, sums[r][h]);
  }
}

template <int ROWS>
void multiply_tile(const Panel& panel, const InputTile& x, float* out, int32_t stride) {
  const auto groups = panel.type == CT_Q6_K   ? multiply_groups<16, false>
                      : panel.type == CT_Q8_0 ? multiply_groups<32, true>
                                              : multiply_groups<32, false>;
  for (int row = 0; row < ROWS; row += AT_ONCE) {
    for (int side = 0; side < PANEL; side += SIDES * LANES) {
      groups(panel, x, side, row, out + row * stride, stride);
    }
  }
}

}  // namespace
}  // namespace chatterm
