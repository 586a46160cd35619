// Quantised rows side by side: lane r of a vector has the numbers of row r, read as stored in a file or interleaved.
// What differs between instruction sets is in lanes_avx2.h and lanes_neon.h. Part of products_lanes.h.
#pragma once

namespace chatterm {
namespace {

template <typename From>
inline void gather_32(const From& from, int at, LaneBits* out) {
  from.sixteen(at, out);
  from.sixteen(at + 16, out + 4);
}

// Byte j of each number.
inline LaneFloats byte_of(LaneBits v, int j) { return to_floats((LaneInts)(v >> (8 * j) & 255u)); }

// A block of all rows: the digits of columns 32 * part.., four per lane, and a scale and a low for each group of
// columns. DEPTH times two products fit into 16 bits.
template <int TYPE>
struct Lanes;

template <typename From>
inline void nibbles_of(const From& from, int at, LaneBits* out) {
  LaneBits packed[4];
  from.sixteen(at, packed);
  CT_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = low_nibbles(packed[i]), out[i + 4] = high_nibbles(packed[i]);
}

template <>
struct Lanes<CT_Q4_0> {
  static constexpr int PARTS = 1, BYTES = Q4_0_BYTES, GROUP = 32, DEPTH = 8;  // 8 * 2 * 15 * 127 < 2^15
  LaneFloats step;
  template <typename From>
  void open(const From& from) { step = from.halves(0); }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const { nibbles_of(from, 2, out); }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * -8.0f; }
};

template <>
struct Lanes<CT_Q4_1> {
  static constexpr int PARTS = 1, BYTES = Q4_1_BYTES, GROUP = 32, DEPTH = 8;
  LaneFloats step, least;
  template <typename From>
  void open(const From& from) {
    from.two_halves(step, least);
  }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const { nibbles_of(from, 4, out); }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return least; }
};

template <>
struct Lanes<CT_Q8_0> {
  static constexpr int PARTS = 1, BYTES = Q8_0_BYTES, GROUP = 32, DEPTH = 1;
  LaneFloats step;
  template <typename From>
  void open(const From& from) { step = from.halves(0); }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const {
    gather_32(from, 2, out);
    CT_UNROLL
    for (int i = 0; i < 8 && !SIGNED_BYTES; ++i) out[i] ^= 0x80808080u;
  }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * -128.0f; }
};

template <>
struct Lanes<CT_MXFP4> {
  static constexpr int PARTS = 1, BYTES = MXFP4_BYTES, GROUP = 32, DEPTH = 4;  // 4 * 2 * 24 * 127 < 2^15
  LaneFloats step;
  template <typename From>
  void open(const From& from) {
    const LaneInts e = from.bytes(0);
    step = (LaneFloats)(e < 2 ? 0x00200000 + (e & 1) * 0x00200000 : (e - 1) << 23);  // mxfp4_scale
  }
  template <typename From>
  void digits(const From& from, int, LaneBits* out) const {
    nibbles_of(from, 1, out);
    CT_UNROLL
    for (int i = 0; i < 8; ++i) out[i] = mxfp4_digits(out[i]);
  }
  LaneFloats scale(int) const { return step; }
  LaneFloats low(int) const { return step * float(-MXFP4_ZERO); }
};

// Q4_K, and Q5_K with FIFTH.
template <bool FIFTH>
struct LanesK {
  static constexpr int PARTS = 8, BYTES = FIFTH ? Q5_K_BYTES : Q4_K_BYTES, GROUP = 32, DEPTH = FIFTH ? 4 : 8;
  LaneFloats step, least;
  LaneBits scales[2], minima[2];  // four bytes each
  LaneBits fifth[8];              // the fifth binary digits of all parts
  LaneBits packed[8];             // two parts

  template <typename From>
  void open(const From& from) {
    LaneBits head[4];
    from.sixteen(0, head);
    split_halves(head[0], step, least);
    scales[0] = head[1] & 0x3f3f3f3fu;
    minima[0] = head[2] & 0x3f3f3f3fu;
    scales[1] = (head[3] & 0x0f0f0f0fu) | (head[1] >> 6 & 0x03030303u) << 4;
    minima[1] = (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 6 & 0x03030303u) << 4;
    if (FIFTH) gather_32(from, 16, fifth);
  }
  template <typename From>
  void digits(const From& from, int part, LaneBits* out) {
    if (part % 2 == 0) gather_32(from, (FIFTH ? 48 : 16) + 16 * part, packed);
    CT_UNROLL
    for (int i = 0; i < 8; ++i) {
      out[i] = part % 2 ? high_nibbles(packed[i]) : low_nibbles(packed[i]);
      if (FIFTH) out[i] = with_upper(out[i], fifth[i] >> part & 0x01010101u);
    }
  }
  LaneFloats scale(int part) const { return byte_of(scales[part / 4], part % 4) * step; }
  LaneFloats low(int part) const { return byte_of(minima[part / 4], part % 4) * -least; }
};

template <>
struct Lanes<CT_Q4_K> : LanesK<false> {};
template <>
struct Lanes<CT_Q5_K> : LanesK<true> {};

template <>
struct Lanes<CT_Q6_K> {
  static constexpr int PARTS = 8, BYTES = Q6_K_BYTES, GROUP = 16, DEPTH = 2;  // 2 * 2 * 63 * 127 < 2^15
  LaneFloats step;
  LaneBits scales[4];             // four signed bytes each
  LaneBits lower[2][8], upper[8];  // of a half of the block

  template <typename From>
  void open(const From& from) {
    step = from.halves(208);
    from.sixteen(192, scales);
  }
  template <typename From>
  void digits(const From& from, int part, LaneBits* out) {
    const int half = part / 4, k = part % 4;
    if (k == 0) {
      gather_32(from, 64 * half, lower[0]);
      gather_32(from, 64 * half + 32, lower[1]);
      gather_32(from, 128 + 32 * half, upper);
    }
    CT_UNROLL
    for (int i = 0; i < 8; ++i) {
      const LaneBits low = k < 2 ? low_nibbles(lower[k % 2][i]) : high_nibbles(lower[k % 2][i]);
      out[i] = with_upper(low, upper[i] >> (2 * k) & 0x03030303u);
    }
  }
  LaneFloats scale(int group) const {
    return to_floats((LaneInts)(scales[group / 4] << (24 - group % 4 * 8)) >> 24) * step;
  }
  LaneFloats low(int group) const { return scale(group) * -32.0f; }
};

}  // namespace
}  // namespace chatterm
