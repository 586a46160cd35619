// Vectors of four lanes for ARM with dot products. Part of products_lanes.h.
#pragma once

#include <arm_neon.h>

namespace chatterm {
namespace {

constexpr int LANES = 4;
typedef Floats::Four LaneFloats;
typedef Ints::Four LaneInts;
typedef Words::Four LaneBits;  // four bytes of each row

constexpr bool SIGNED_BYTES = true;

inline void add_fours(const int8_t* q, int32_t* out) {
  for (int i = 0; i < 32; i += 16) {
    vst1q_s32(out + i / 4, vdotq_s32(vdupq_n_s32(0), vld1q_s8(q + i), vdupq_n_s8(1)));
  }
}

inline LaneBits load_bits(const void* p) { return (LaneBits)vld1q_u8((const uint8_t*)p); }

// Splits words of two half floats, one word per row, into the lower and the upper ones.
inline void split_halves(LaneBits words, LaneFloats& lower, LaneFloats& upper) {
  lower = (LaneFloats)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)words)));
  upper = (LaneFloats)vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32((uint32x4_t)words, 16)));
}

// A block of LANES rows that are stored one after the other, as in a file. `at` is an offset in bytes into the block.
struct Apart {
  const uint8_t* const* rows;
  ptrdiff_t block;

  const uint8_t* of(int r, int at) const { return rows[r] + block + at; }

  // A half float of each row.
  LaneFloats halves(int at) const {
    uint16x4_t v = vdup_n_u16(load_u16(of(0, at)));
    v = vset_lane_u16(load_u16(of(1, at)), v, 1);
    v = vset_lane_u16(load_u16(of(2, at)), v, 2);
    v = vset_lane_u16(load_u16(of(3, at)), v, 3);
    return (LaneFloats)vcvt_f32_f16(vreinterpret_f16_u16(v));
  }

  // A byte of each row.
  LaneInts bytes(int at) const { return LaneInts{*of(0, at), *of(1, at), *of(2, at), *of(3, at)}; }

  // Two half floats of each row, at the beginning of the block.
  void two_halves(LaneFloats& lower, LaneFloats& upper) const {
    split_halves(LaneBits{load_u32(of(0, 0)), load_u32(of(1, 0)), load_u32(of(2, 0)), load_u32(of(3, 0))}, lower, upper);
  }

  // 16 bytes of each row: out[i] has bytes 4 * i.. of each.
  void sixteen(int at, LaneBits* out) const {
    uint32x4_t v[4];
    CT_UNROLL
    for (int r = 0; r < 4; ++r) v[r] = (uint32x4_t)load_bits(of(r, at));
    const uint64x2_t low = (uint64x2_t)vtrn1q_u32(v[0], v[1]), high = (uint64x2_t)vtrn2q_u32(v[0], v[1]);
    const uint64x2_t low2 = (uint64x2_t)vtrn1q_u32(v[2], v[3]), high2 = (uint64x2_t)vtrn2q_u32(v[2], v[3]);
    out[0] = (LaneBits)vtrn1q_u64(low, low2);
    out[1] = (LaneBits)vtrn1q_u64(high, high2);
    out[2] = (LaneBits)vtrn2q_u64(low, low2);
    out[3] = (LaneBits)vtrn2q_u64(high, high2);
  }
};

// The same for interleaved rows (interleave.h).
template <int TYPE>
struct Interleaved {
  using Order = InterleavedBlock<TYPE>;
  const uint8_t* block;  // of the PANEL rows
  int first;             // index of the LANES rows among them

  LaneBits word(int at) const { return load_bits(block + Order::word(at) + 4 * first); }
  LaneFloats halves(int) const {
    return (LaneFloats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(block + 2 * first)));
  }
  LaneInts bytes(int) const {
    const uint8x8_t four = vreinterpret_u8_u32(vdup_n_u32(load_u32(block + first)));
    return (LaneInts)vmovl_u16(vget_low_u16(vmovl_u8(four)));
  }
  void two_halves(LaneFloats& lower, LaneFloats& upper) const { split_halves(word(0), lower, upper); }
  void sixteen(int at, LaneBits* out) const {
    CT_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = word(at + 4 * i);
  }
};

// The same number in all lanes.
inline LaneFloats spread(float x) { return (LaneFloats)vdupq_n_f32(x); }

// a * b + c, rounded once
inline LaneFloats fused(LaneFloats a, LaneFloats b, LaneFloats c) { return (LaneFloats)vfmaq_f32(c, a, b); }

inline LaneBits low_nibbles(LaneBits v) { return v & 0x0f0f0f0fu; }
inline LaneBits high_nibbles(LaneBits v) { return (LaneBits)vshrq_n_u8((uint8x16_t)v, 4); }

// Digits with further binary digits above their lower four.
inline LaneBits with_upper(LaneBits low, LaneBits upper) {
  return (LaneBits)vsliq_n_u8((uint8x16_t)low, (uint8x16_t)upper, 4);
}

inline LaneBits mxfp4_digits(LaneBits nibbles) {
  return (LaneBits)vqtbl1q_u8(vld1q_u8(MXFP4_DIGITS), (uint8x16_t)nibbles);
}

// sums + the products of a and of number `lane` of b, added up in fours.
inline LaneInts add_dot(LaneInts sums, LaneBits a, LaneBits b, int lane) {
  const int32x4_t s = (int32x4_t)sums;
  const int8x16_t digits = (int8x16_t)a, x = (int8x16_t)b;
  switch (lane) {
    case 0:
      return (LaneInts)vdotq_laneq_s32(s, digits, x, 0);
    case 1:
      return (LaneInts)vdotq_laneq_s32(s, digits, x, 1);
    case 2:
      return (LaneInts)vdotq_laneq_s32(s, digits, x, 2);
    default:
      return (LaneInts)vdotq_laneq_s32(s, digits, x, 3);
  }
}

#ifdef __ARM_FEATURE_MATMUL_INT8

// Two words of each row as matrices of two rows.
inline void join_words(LaneBits first, LaneBits second, LaneBits* out) {
  out[0] = (LaneBits)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
  out[1] = (LaneBits)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
}

// sums + two rows of inputs times two rows of digits, eight columns each: those of the first row of inputs come first.
inline LaneInts add_matrix(LaneInts sums, LaneBits x, LaneBits digits) {
  return (LaneInts)vmmlaq_s32((int32x4_t)sums, (int8x16_t)x, (int8x16_t)digits);
}

// The sums of LANES rows with two rows of inputs, row by row.
inline void part_sums(LaneInts left, LaneInts right, LaneInts& first, LaneInts& second) {
  first = (LaneInts)vzip1q_s64((int64x2_t)left, (int64x2_t)right);
  second = (LaneInts)vzip2q_s64((int64x2_t)left, (int64x2_t)right);
}

#endif

// Stores 32 digits of each row among the digits of a panel, from row `side` on.
inline void place_digits(const LaneBits* digits, uint32_t* out, int32_t side) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  CT_UNROLL
  for (int i = 0; i < 8; i += 2) {
    LaneBits words[2];
    join_words(digits[i], digits[i + 1], words);
    std::memcpy(out + word_of(i, side, PANEL), words, sizeof words);
  }
#else
  CT_UNROLL
  for (int i = 0; i < 8; ++i) store_as(out + word_of(i, side, PANEL), digits[i]);
#endif
}

// dots[r] = the products of COUNT * 4 digits of each row with as many numbers of row r of N rows of inputs.
template <int COUNT, int, bool, int N>
inline void dots_of(const LaneBits* digits, const uint32_t* q, LaneInts* dots) {
  constexpr int WIDE = wide_of(N);
#ifdef __ARM_FEATURE_MATMUL_INT8
  if constexpr (N > 3) {
    LaneInts sums[(N + 1) / 2][2] = {};
    CT_UNROLL
    for (int j = 0; j < COUNT; j += 2) {
      LaneBits words[2];
      join_words(digits[j], digits[j + 1], words);
      CT_UNROLL
      for (int r = 0; r < N; r += 2) {
        const LaneBits x = load_bits(q + word_of(j, r, WIDE));
        sums[r / 2][0] = add_matrix(sums[r / 2][0], x, words[0]);
        sums[r / 2][1] = add_matrix(sums[r / 2][1], x, words[1]);
      }
    }
    LaneInts unused;
    CT_UNROLL
    for (int r = 0; r < N; r += 2) part_sums(sums[r / 2][0], sums[r / 2][1], dots[r], r + 1 < N ? dots[r + 1] : unused);
    return;
  }
#endif
  CT_UNROLL
  for (int r = 0; r < N; ++r) dots[r] = LaneInts{};
  CT_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    CT_UNROLL
    for (int r = 0; r < N; ++r) {
      const int word = int(word_of(j, r, WIDE));
      dots[r] = add_dot(dots[r], digits[j], load_bits(q + word / 4 * 4), word % 4);
    }
  }
}

// How many times LANES interleaved rows are multiplied at once, so that their sums with N rows of inputs fit into the
// registers.
template <int, int N>
constexpr int sides_of() {
  return N <= 2 ? 4 : N <= 4 ? 2 : 1;
}

// The same for rows as stored.
template <int TYPE, int N>
constexpr int sides_apart() {
  return is_small(TYPE) && N <= 4 ? 2 : 1;
}

}  // namespace
}  // namespace chatterm
