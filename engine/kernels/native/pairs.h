// Eight numbers as two vectors of four with the operators of a single vector, for instruction sets whose vectors have
// four: GCC keeps longer ones in memory. Part of vectors.h.
#pragma once

#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

namespace {

template <typename Number>
struct Pair {
  typedef Number Four __attribute__((vector_size(16)));
  typedef Number Scalar;
  Four low, high;

  Number operator[](int i) const { return i < 4 ? low[i] : high[i - 4]; }
  Pair operator-() const { return {-low, -high}; }
  template <typename Other>
  Pair& operator+=(const Other& other) {
    return *this = *this + other;
  }
  // The same bits.
  template <typename To>
  explicit operator Pair<To>() const {
    return {(typename Pair<To>::Four)low, (typename Pair<To>::Four)high};
  }
};

typedef Pair<float> Floats;
typedef Pair<int32_t> Ints;
typedef Pair<uint32_t> Words;

// An operator of pairs, and of a pair and one number.
#define CT_OPERATOR(SIGN, RESULT)                                              \
  template <typename N>                                                        \
  inline RESULT operator SIGN(Pair<N> a, Pair<N> b) {                          \
    return {a.low SIGN b.low, a.high SIGN b.high};                             \
  }                                                                            \
  template <typename N>                                                        \
  inline RESULT operator SIGN(Pair<N> a, typename Pair<N>::Scalar b) {         \
    return {a.low SIGN b, a.high SIGN b};                                      \
  }                                                                            \
  template <typename N>                                                        \
  inline RESULT operator SIGN(typename Pair<N>::Scalar a, Pair<N> b) {         \
    return {a SIGN b.low, a SIGN b.high};                                      \
  }

CT_OPERATOR(+, Pair<N>)
CT_OPERATOR(-, Pair<N>)
CT_OPERATOR(*, Pair<N>)
CT_OPERATOR(/, Pair<N>)
CT_OPERATOR(&, Pair<N>)
CT_OPERATOR(|, Pair<N>)
CT_OPERATOR(<<, Pair<N>)
CT_OPERATOR(>>, Pair<N>)
CT_OPERATOR(<, Ints)
CT_OPERATOR(>, Ints)
CT_OPERATOR(==, Ints)

#undef CT_OPERATOR

template <typename N>
inline Pair<N> choose(Ints where, Pair<N> yes, Pair<N> no) {
  return {where.low ? yes.low : no.low, where.high ? yes.high : no.high};
}

// Vectors one by one: a pair that is copied as a whole would be in memory.
template <typename V>
inline V load_as(const void* p) {
  V v;
  if constexpr (sizeof v == 16) {
    std::memcpy(&v, p, sizeof v);
  } else {
    v = {load_as<typename V::Four>(p), load_as<typename V::Four>((const char*)p + 16)};
  }
  return v;
}

template <typename V>
inline void store_as(void* p, V v) {
  if constexpr (sizeof v == 16) {
    std::memcpy(p, &v, sizeof v);
  } else {
    store_as(p, v.low);
    store_as((char*)p + 16, v.high);
  }
}

inline Floats::Four to_floats(Ints::Four v) { return __builtin_convertvector(v, Floats::Four); }
inline Floats to_floats(Ints v) { return {to_floats(v.low), to_floats(v.high)}; }

#ifdef __ARM_NEON

inline float sum_of(Floats v) { return vaddvq_f32(vpaddq_f32(v.low, v.high)); }

inline float largest_of(Floats v) { return vmaxvq_f32(vmaxq_f32(v.low, v.high)); }

inline void sum_four(Floats a, Floats b, Floats c, Floats d, float* out) {
  const float32x4_t first = vpaddq_f32(vpaddq_f32(a.low, a.high), vpaddq_f32(b.low, b.high));
  const float32x4_t second = vpaddq_f32(vpaddq_f32(c.low, c.high), vpaddq_f32(d.low, d.high));
  vst1q_f32(out, vpaddq_f32(first, second));
}

inline Words widen_shorts(const uint8_t* p) {
  const uint16x8_t v = vreinterpretq_u16_u8(vld1q_u8(p));
  return {(Words::Four)vmovl_u16(vget_low_u16(v)), (Words::Four)vmovl_high_u16(v)};
}

inline void narrow_shorts(uint8_t* p, Words v) {
  vst1q_u8(p, vreinterpretq_u8_u16(vmovn_high_u32(vmovn_u32((uint32x4_t)v.low), (uint32x4_t)v.high)));
}

template <bool SIGNED>
inline Ints widen_bytes(const uint8_t* p) {
  const uint8x8_t bytes = vld1_u8(p);
  const int16x8_t v = SIGNED ? vmovl_s8(vreinterpret_s8_u8(bytes)) : vreinterpretq_s16_u16(vmovl_u8(bytes));
  return {(Ints::Four)vmovl_s16(vget_low_s16(v)), (Ints::Four)vmovl_high_s16(v)};
}

inline void narrow_bytes(int8_t* p, Ints v) {
  vst1_s8(p, vmovn_s16(vmovn_high_s32(vmovn_s32((int32x4_t)v.low), (int32x4_t)v.high)));
}

inline Floats widen_halves(const uint8_t* p) {
  const float16x8_t v = vreinterpretq_f16_u8(vld1q_u8(p));
  return {(Floats::Four)vcvt_f32_f16(vget_low_f16(v)), (Floats::Four)vcvt_high_f32_f16(v)};
}

inline void narrow_halves(uint8_t* p, Floats v) {
  const float16x4_t low = vcvt_f16_f32((float32x4_t)v.low);
  vst1q_u8(p, vreinterpretq_u8_f16(vcvt_high_f16_f32(low, (float32x4_t)v.high)));
}

#else

inline float sum_of(Floats v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

inline float largest_of(Floats v) {
  float most = v[0];
  for (int i = 1; i < 8; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

inline void sum_four(Floats a, Floats b, Floats c, Floats d, float* out) {
  out[0] = sum_of(a), out[1] = sum_of(b), out[2] = sum_of(c), out[3] = sum_of(d);
}

// Calls part with the index of each number; they become a vector.
template <typename V, typename Part>
inline V each_of(const Part& part) {
  typename V::Scalar numbers[8];
  for (int i = 0; i < 8; ++i) numbers[i] = part(i);
  return load_as<V>(numbers);
}

inline Words widen_shorts(const uint8_t* p) {
  return each_of<Words>([p](int i) { return load_u16(p + 2 * i); });
}

inline void narrow_shorts(uint8_t* p, Words v) {
  for (int i = 0; i < 8; ++i) {
    const uint16_t number = uint16_t(v[i]);
    std::memcpy(p + 2 * i, &number, sizeof number);
  }
}

template <bool SIGNED>
inline Ints widen_bytes(const uint8_t* p) {
  return each_of<Ints>([p](int i) { return SIGNED ? int8_t(p[i]) : p[i]; });
}

inline void narrow_bytes(int8_t* p, Ints v) {
  for (int i = 0; i < 8; ++i) p[i] = int8_t(v[i]);
}

inline Floats widen_halves(const uint8_t* p) {
  return each_of<Floats>([p](int i) { return load_half(p + 2 * i); });
}

inline void narrow_halves(uint8_t* p, Floats v) {
  for (int i = 0; i < 8; ++i) {
    const uint16_t half = float_to_half(v[i]);
    std::memcpy(p + 2 * i, &half, sizeof half);
  }
}

#endif

}  // namespace
