// The block formats of GGUF, read without assuming an alignment, and half floats.
#pragma once

#include <cstdint>
#include <cstring>

#include "chatterm_native.h"

namespace {

constexpr int Q4_0_BYTES = 18, Q4_1_BYTES = 20, Q8_0_BYTES = 34, Q4_K_BYTES = 144, Q5_K_BYTES = 176,
              Q6_K_BYTES = 210, MXFP4_BYTES = 17;

// The digits of MXFP4 by their codes; 12 is added so that none is negative.
constexpr int MXFP4_ZERO = 12;
alignas(16) constexpr uint8_t MXFP4_DIGITS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Numbers and bytes of a block; 0 for a type without kernels.
struct BlockShape {
  int32_t numbers, bytes;
};

constexpr BlockShape shape_of(int32_t type) {
  switch (type) {
    case CT_F32:
      return {1, 4};
    case CT_F16:
    case CT_BF16:
      return {1, 2};
    case CT_Q4_0:
      return {32, Q4_0_BYTES};
    case CT_Q4_1:
      return {32, Q4_1_BYTES};
    case CT_Q8_0:
      return {32, Q8_0_BYTES};
    case CT_Q4_K:
      return {256, Q4_K_BYTES};
    case CT_Q5_K:
      return {256, Q5_K_BYTES};
    case CT_Q6_K:
      return {256, Q6_K_BYTES};
    case CT_MXFP4:
      return {32, MXFP4_BYTES};
    default:
      return {0, 0};
  }
}

template <int32_t VALUE>
struct Constant {
  static constexpr int32_t value = VALUE;
};

// Calls part with a quantised type as a constant.
template <typename Part>
inline auto by_blocks(int32_t type, const Part& part) {
  switch (type) {
    case CT_Q4_0:
      return part(Constant<CT_Q4_0>{});
    case CT_Q4_1:
      return part(Constant<CT_Q4_1>{});
    case CT_Q8_0:
      return part(Constant<CT_Q8_0>{});
    case CT_Q4_K:
      return part(Constant<CT_Q4_K>{});
    case CT_Q5_K:
      return part(Constant<CT_Q5_K>{});
    case CT_MXFP4:
      return part(Constant<CT_MXFP4>{});
    default:
      return part(Constant<CT_Q6_K>{});
  }
}

// Whether a block is one group of 32 numbers.
constexpr bool is_small(int32_t type) {
  return type == CT_Q4_0 || type == CT_Q4_1 || type == CT_Q8_0 || type == CT_MXFP4;
}

// Calls part with a type of small blocks as a constant.
template <typename Part>
inline auto by_small_blocks(int32_t type, const Part& part) {
  switch (type) {
    case CT_Q4_0:
      return part(Constant<CT_Q4_0>{});
    case CT_Q4_1:
      return part(Constant<CT_Q4_1>{});
    case CT_MXFP4:
      return part(Constant<CT_MXFP4>{});
    default:
      return part(Constant<CT_Q8_0>{});
  }
}

inline uint16_t load_u16(const void* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

inline uint32_t load_u32(const void* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// 2 to the power of a stored exponent minus 128: the scale of a block of MXFP4.
inline float mxfp4_scale(uint8_t exponent) {
  return as_float(exponent < 2 ? 0x00200000u << exponent : uint32_t(exponent - 1) << 23);
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // A multiplication moves the exponent, which makes denormals right, too.
  return as_float(sign | as_bits(as_float(rest << 13) * as_float(0x77800000)));
}

inline float load_half(const void* p) { return half_to_float(load_u16(p)); }

inline uint16_t float_to_half(float value) {
  const uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (rest < 0x38800000) {  // a denormal half: adding 0.5 rounds its last bit to the end of the fraction
    return uint16_t(sign | (as_bits(as_float(rest) + 0.5f) - 0x3f000000));
  }
  return uint16_t(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

inline float load_bf16(const void* p) { return as_float(uint32_t(load_u16(p)) << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Scale and minimum of sub-block j (of 8) of Q4_K and Q5_K: 6 bits each, packed in 12 bytes.
inline void k_scale(const uint8_t* packed, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = packed[j] & 63;
    minimum = packed[j + 4] & 63;
  } else {
    scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4);
    minimum = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4);
  }
}

// The 256 digits of a block: Q4_K 0..15, Q5_K 0..31, Q6_K 0..63 (before 32 is subtracted).
inline void q4_k_digits(const uint8_t* block, uint8_t* out) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 32; ++i) {
      const uint8_t byte = block[16 + 32 * j + i];
      out[64 * j + i] = byte & 15;
      out[64 * j + 32 + i] = byte >> 4;
    }
  }
}

inline void q5_k_digits(const uint8_t* block, uint8_t* out) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 32; ++i) {
      const uint8_t byte = block[48 + 32 * j + i], high = block[16 + i];
      out[64 * j + i] = uint8_t((byte & 15) | (high >> (2 * j) & 1) << 4);
      out[64 * j + 32 + i] = uint8_t(byte >> 4 | (high >> (2 * j + 1) & 1) << 4);
    }
  }
}

inline void q6_k_digits(const uint8_t* block, uint8_t* out) {
  for (int h = 0; h < 2; ++h) {
    const uint8_t *low = block + 64 * h, *high = block + 128 + 32 * h;
    for (int i = 0; i < 32; ++i) {
      out[128 * h + i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
      out[128 * h + 32 + i] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      out[128 * h + 64 + i] = uint8_t(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      out[128 * h + 96 + i] = uint8_t(low[i + 32] >> 4 | (high[i] >> 6) << 4);
    }
  }
}

}  // namespace
