// Blocks of 32 for AVX-512 with VNNI, two at a time: one vector holds the digits of both. Part of products_avx2.h.
//
// An odd last block is paired with zeros; nothing past it is read.

// Digits of two blocks, `apart` bytes from each other
inline __m512i two_nibbles(const uint8_t* p, int apart) {
  const __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
  const __m512i both = _mm512_mask_broadcast_i32x4(first, 0xff00, _mm_loadu_si128((const __m128i*)(p + apart)));
  const __m512i shifts = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
  return _mm512_and_si512(_mm512_srlv_epi64(both, shifts), _mm512_set1_epi8(15));
}

inline __m512i two_bytes(const uint8_t* p, int apart) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_bytes(p)), load_bytes(p + apart), 1);
}

// The scale of the first block in the lower half, that of the second in the upper one
inline __m512 two_halves(const uint8_t* p, int apart) {
  const __m128i both = _mm_insert_epi16(_mm_cvtsi32_si128(load_u16(p)), load_u16(p + apart), 1);
  const __m512i which = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_permutexvar_ps(which, _mm512_castps128_ps512(_mm_cvtph_ps(both)));
}

inline __m512 two_scales(const float* pair) {
  const __m512i which = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_permutexvar_ps(which, _mm512_castps128_ps512(_mm_loadu_ps(pair)));
}

inline __m512 add_scaled(__m512 sum, __m512i dot, __m512 scale) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
}

template <int ROWS>
struct Q4_1Rows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    const int32_t blocks = columns / 32;
    const __m512i which = _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 sums[ROWS];
    __m128 lows[ROWS];  // what belongs to the minima is in the odd places
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps(), lows[r] = _mm_setzero_ps();
    for (int32_t b = 0; b + 2 <= blocks; b += 2) {
      const __m512i q = _mm512_loadu_si512(x.q + 32 * b);
      const __m128 pair = _mm_loadu_ps(x.pair + 2 * b);
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q4_1_BYTES;
        ask_for(block, ahead);
        const __m128i halves = _mm_insert_epi32(_mm_cvtsi32_si128(int32_t(load_u32(block))),
                                                int32_t(load_u32(block + Q4_1_BYTES)), 1);
        const __m128 both = _mm_mul_ps(_mm_cvtph_ps(halves), pair);
        lows[r] = _mm_add_ps(lows[r], both);
        const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), two_nibbles(block + 4, Q4_1_BYTES), q);
        sums[r] = add_scaled(sums[r], dot, _mm512_permutexvar_ps(which, _mm512_castps128_ps512(both)));
      }
    }
    if (blocks % 2) {
      const int32_t b = blocks - 1;
      const __m128 pair = _mm_castpd_ps(_mm_load_sd((const double*)(x.pair + 2 * b)));
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q4_1_BYTES;
        const __m128 both = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(int32_t(load_u32(block)))), pair);
        lows[r] = _mm_add_ps(lows[r], both);
        const __m256i dot = add_dot(_mm256_setzero_si256(), nibbles(block + 4), load_bytes(x.q + 32 * b));
        const __m512 scale = _mm512_permutexvar_ps(which, _mm512_castps128_ps512(both));
        sums[r] = add_scaled(sums[r], _mm512_zextsi256_si512(dot), scale);
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      const __m128 odd = _mm_movehdup_ps(lows[r]);
      out[r] = _mm512_reduce_add_ps(sums[r]) + _mm_cvtss_f32(_mm_add_ss(odd, _mm_movehl_ps(odd, odd)));
    }
  }
};

template <int ROWS>
struct Q4_0Rows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    const int32_t blocks = columns / 32;
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps();
    for (int32_t b = 0; b + 2 <= blocks; b += 2) {
      const __m512i q = _mm512_loadu_si512(x.q + 32 * b);
      const __m512i eights = _mm512_slli_epi32(_mm512_loadu_si512(x.fours + 8 * b), 3);
      const __m512i begin = _mm512_sub_epi32(_mm512_setzero_si512(), eights);
      const __m512 scale = two_scales(x.pair + 2 * b);
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q4_0_BYTES;
        ask_for(block, ahead);
        const __m512i dot = _mm512_dpbusd_epi32(begin, two_nibbles(block + 2, Q4_0_BYTES), q);
        sums[r] = add_scaled(sums[r], dot, _mm512_mul_ps(two_halves(block, Q4_0_BYTES), scale));
      }
    }
    if (blocks % 2) {
      const int32_t b = blocks - 1;
      const __m256i eights = _mm256_slli_epi32(load_bytes(x.fours + 8 * b), 3);
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q4_0_BYTES;
        const __m256i begin = _mm256_sub_epi32(_mm256_setzero_si256(), eights);
        const __m256i dot = add_dot(begin, nibbles(block + 2), load_bytes(x.q + 32 * b));
        const __m256 scale = _mm256_mul_ps(one_half(block), _mm256_set1_ps(x.pair[2 * b]));
        sums[r] = add_scaled(sums[r], _mm512_zextsi256_si512(dot), _mm512_zextps256_ps512(scale));
      }
    }
    for (int r = 0; r < ROWS; ++r) out[r] = _mm512_reduce_add_ps(sums[r]);
  }
};

template <int ROWS>
struct Q8_0Rows {
  static void run(const uint8_t* rows, size_t row_bytes, int32_t columns, ptrdiff_t ahead, const Activation& x,
                  float* out) {
    const int32_t blocks = columns / 32;
    // The weights become unsigned by adding 128, which is taken off again through the sums of the activation.
    const __m512i sign = _mm512_set1_epi8(-128);
    __m512 sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps();
    for (int32_t b = 0; b + 2 <= blocks; b += 2) {
      const __m512i q = _mm512_loadu_si512(x.q + 32 * b);
      const __m512i extra = _mm512_slli_epi32(_mm512_loadu_si512(x.fours + 8 * b), 7);
      const __m512i begin = _mm512_sub_epi32(_mm512_setzero_si512(), extra);
      const __m512 scale = two_scales(x.pair + 2 * b);
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q8_0_BYTES;
        ask_for(block, ahead);
        ask_for(block + Q8_0_BYTES, ahead);
        const __m512i w = _mm512_xor_si512(two_bytes(block + 2, Q8_0_BYTES), sign);
        const __m512i dot = _mm512_dpbusd_epi32(begin, w, q);
        sums[r] = add_scaled(sums[r], dot, _mm512_mul_ps(two_halves(block, Q8_0_BYTES), scale));
      }
    }
    if (blocks % 2) {
      const int32_t b = blocks - 1;
      const __m256i extra = _mm256_slli_epi32(load_bytes(x.fours + 8 * b), 7);
      for (int r = 0; r < ROWS; ++r) {
        const uint8_t* block = rows + size_t(r) * row_bytes + b * Q8_0_BYTES;
        const __m256i begin = _mm256_sub_epi32(_mm256_setzero_si256(), extra);
        const __m256i w = _mm256_xor_si256(load_bytes(block + 2), _mm256_set1_epi8(-128));
        const __m256i dot = add_dot(begin, w, load_bytes(x.q + 32 * b));
        const __m256 scale = _mm256_mul_ps(one_half(block), _mm256_set1_ps(x.pair[2 * b]));
        sums[r] = add_scaled(sums[r], _mm512_zextsi256_si512(dot), _mm512_zextps256_ps512(scale));
      }
    }
    for (int r = 0; r < ROWS; ++r) out[r] = _mm512_reduce_add_ps(sums[r]);
  }
};
