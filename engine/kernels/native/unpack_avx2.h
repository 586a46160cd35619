// Unpacks rows of a weight to panels with AVX2: 32 columns of 8 rows at a time. Part of panels.h.
#pragma once

namespace chatterm {
namespace {

// Expands 16 bytes to 32 digits: the low halves, then the high halves.
inline __m256i nibbles(const uint8_t* p) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  const __m256i shifts = _mm256_set_epi64x(4, 4, 0, 0);
  return _mm256_and_si256(_mm256_srlv_epi64(twice, shifts), _mm256_set1_epi8(15));
}

// Stores number r of a group's scales and lows.
inline void place_scale(float scale, float low, int32_t group, int32_t r, Panel& out) {
  out.scale[group * PANEL + r] = scale;
  out.low[group * PANEL + r] = low;
}

// Scales and minima of a Q4_K or Q5_K block as 8 + 8 numbers of 16 bits.
inline __m256i k_scales(const uint8_t* packed) {
  const uint32_t first = load_u32(packed), second = load_u32(packed + 4), rest = load_u32(packed + 8);
  const uint32_t scales = (rest & 0x0f0f0f0f) | (first >> 6 & 0x03030303) << 4;
  const uint32_t minima = (rest >> 4 & 0x0f0f0f0f) | (second >> 6 & 0x03030303) << 4;
  return _mm256_cvtepu8_epi16(
      _mm_set_epi32(int32_t(minima), int32_t(second & 0x3f3f3f3f), int32_t(scales), int32_t(first & 0x3f3f3f3f)));
}

// Column i of 8 rows of 8 numbers of 4 bytes becomes row i.
inline void transpose(__m256i* rows) {
  __m256i twos[8], fours[8];
  CT_UNROLL
  for (int i = 0; i < 8; i += 2) {
    twos[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    twos[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  CT_UNROLL
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_unpacklo_epi64(twos[i], twos[i + 2]);
    fours[i + 1] = _mm256_unpackhi_epi64(twos[i], twos[i + 2]);
    fours[i + 2] = _mm256_unpacklo_epi64(twos[i + 1], twos[i + 3]);
    fours[i + 3] = _mm256_unpackhi_epi64(twos[i + 1], twos[i + 3]);
  }
  CT_UNROLL
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}

inline float number_of(const uint8_t* half) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(half))));
}

// The memory layout of a format: `digits` are those of columns 32 * part.. of a block, `scales` those of the whole
// block.
template <int TYPE>
struct Format;

template <>
struct Format<CT_Q4_0> {
  static constexpr int PARTS = 1, BYTES = Q4_0_BYTES;
  static __m256i digits(const uint8_t* block, int) { return nibbles(block + 2); }
  static void scales(const uint8_t* block, int32_t b, int32_t r, Panel& out) {
    const float scale = number_of(block);
    place_scale(scale, -8.0f * scale, b, r, out);
  }
};

template <>
struct Format<CT_Q4_1> {
  static constexpr int PARTS = 1, BYTES = Q4_1_BYTES;
  static __m256i digits(const uint8_t* block, int) { return nibbles(block + 4); }
  static void scales(const uint8_t* block, int32_t b, int32_t r, Panel& out) {
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(int32_t(load_u32(block))));
    place_scale(_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both)), b, r, out);
  }
};

template <>
struct Format<CT_Q8_0> {
  static constexpr int PARTS = 1, BYTES = Q8_0_BYTES;
  static __m256i digits(const uint8_t* block, int) {
    const __m256i bytes = load_bytes(block + 2);
    return SIGNED_BYTES ? bytes : _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
  }
  static void scales(const uint8_t* block, int32_t b, int32_t r, Panel& out) {
    const float scale = number_of(block);
    place_scale(scale, SIGNED_BYTES ? 0.0f : -128.0f * scale, b, r, out);
  }
};

template <>
struct Format<CT_MXFP4> {
  static constexpr int PARTS = 1, BYTES = MXFP4_BYTES;
  static __m256i digits(const uint8_t* block, int) { return mxfp4_digits(nibbles(block + 1)); }
  static void scales(const uint8_t* block, int32_t b, int32_t r, Panel& out) {
    const float scale = mxfp4_scale(block[0]);
    place_scale(scale, float(-MXFP4_ZERO) * scale, b, r, out);
  }
};

// Q4_K and Q5_K
template <int FIRST_BYTE, int SIZE>
struct KFormat {
  static constexpr int PARTS = 8, BYTES = SIZE;
  static __m256i low_digits(const uint8_t* block, int part) {
    const __m256i bytes = load_bytes(block + FIRST_BYTE + 32 * (part / 2));
    return _mm256_and_si256(_mm256_srli_epi16(bytes, part % 2 * 4), _mm256_set1_epi8(15));
  }
  static void scales(const uint8_t* block, int32_t b, int32_t r, Panel& out) {
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(int32_t(load_u32(block))));
    const __m256i packed = k_scales(block + 4);
    const __m256 scales = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(packed)));
    const __m256 minima = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(packed, 1)));
    float scale[8], low[8];
    _mm256_storeu_ps(scale, _mm256_mul_ps(scales, _mm256_broadcastss_ps(both)));
    const __m256 negative = _mm256_set1_ps(-_mm_cvtss_f32(_mm_movehdup_ps(both)));
    _mm256_storeu_ps(low, _mm256_mul_ps(minima, negative));
    for (int j = 0; j < 8; ++j) place_scale(scale[j], low[j], 8 * b + j, r, out);
  }
};

template <>
struct Format<CT_Q4_K> : KFormat<16, Q4_K_BYTES> {
  static __m256i digits(const uint8_t* block, int part) { return low_digits(block, part); }
};

template <>
struct Format<CT_Q5_K> : KFormat<48, Q5_K_BYTES> {
  static __m256i digits(const uint8_t* block, int part) {
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(load_bytes(block + 16), part), _mm256_set1_epi8(1));
    return _mm256_or_si256(low_digits(block, part), _mm256_slli_epi16(high, 4));
  }
};

template <>
struct Format<CT_Q6_K> {
  static constexpr int PARTS = 8, BYTES = Q6_K_BYTES;
  static __m256i digits(const uint8_t* block, int part) {
    const int half = part / 4, k = part % 4;
    const __m256i bytes = load_bytes(block + 64 * half + 32 * (k % 2));
    const __m256i low = _mm256_and_si256(_mm256_srli_epi16(bytes, k / 2 * 4), _mm256_set1_epi8(15));
    const __m256i both = _mm256_srli_epi16(load_bytes(block + 128 + 32 * half), 2 * k);
    return _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(both, _mm256_set1_epi8(3)), 4));
  }
  static void scales(const uint8_t* block, int32_t b, int32_t r, Panel& out) {
    const float d = number_of(block + 208);
    for (int j = 0; j < 16; ++j) {
      const float scale = d * float(int8_t(block[192 + j]));
      place_scale(scale, -32.0f * scale, 16 * b + j, r, out);
    }
  }
};

template <int TYPE>
void unpack_as(const ct_matrix& matrix, int32_t first, int32_t count, Panel& out) {
  using F = Format<TYPE>;
  for (int32_t half = 0; half < count; half += 8) {
    const uint8_t* blocks[8];
    for (int32_t r = 0; r < 8; ++r) {  // missing rows of a panel repeat the last one; their outputs are unused
      const int32_t row = half + r < count ? half + r : count - 1;
      blocks[r] = matrix.data + int64_t(first + row) * matrix.row_bytes;
    }
    for (int32_t b = 0; b < matrix.columns / 32 / F::PARTS; ++b) {
      CT_UNROLL
      for (int part = 0; part < F::PARTS; ++part) {
        __m256i rows[8];
        CT_UNROLL
        for (int r = 0; r < 8; ++r) rows[r] = F::digits(blocks[r], part);
        transpose(rows);
        uint32_t* to = out.digits + (b * F::PARTS + part) * 8 * PANEL + half;
        CT_UNROLL
        for (int i = 0; i < 8; ++i) _mm256_storeu_si256((__m256i*)(to + i * PANEL), rows[i]);
      }
      for (int32_t r = 0; r < 8; ++r) {
        F::scales(blocks[r], b, half + r, out);
        __builtin_prefetch((const char*)(uintptr_t(blocks[r]) + uintptr_t(8 * matrix.row_bytes)));  // the 8 rows after
        blocks[r] += F::BYTES;
      }
    }
  }
}

}  // namespace
}  // namespace chatterm
