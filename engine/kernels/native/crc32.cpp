// CRC-32 as zlib computes it, with carry-less products or ARM's instructions for it: several times as fast.
#include "chatterm_native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <cstring>

#include "arm.h"
#endif

namespace chatterm {

namespace {

#if defined(__x86_64__)

// x times the remainder c, modulo the polynomial. The lowest bit of a remainder is its highest power, as everywhere
// here.
constexpr uint32_t times_x(uint32_t c) { return (c & 1u) != 0u ? c >> 1 ^ 0xEDB88320u : c >> 1; }

// x^n modulo the polynomial, shifted so that the product of two numbers of 64 bits has no gap.
constexpr int64_t power(int32_t n) {
  uint32_t c = 0x80000000u;
  for (int32_t i = 0; i < n; ++i) c = times_x(c);
  return int64_t(uint64_t(c) << 1);
}

// What moves the two halves of 16 bytes forward by a number of bits.
struct Move {
  int64_t high;
  int64_t low;
};

constexpr Move by_bits(int32_t bits) { return {power(bits + 32), power(bits - 32)}; }

constexpr Move FOUR_LANES = by_bits(4 * 128), ONE_LANE = by_bits(128);

struct Table {
  uint32_t of[256] = {};
  constexpr Table() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      of[byte] = byte;
      for (int32_t bit = 0; bit < 8; ++bit) of[byte] = times_x(of[byte]);
    }
  }
};

constexpr Table TABLE;

uint32_t byte_by_byte(uint32_t c, const uint8_t* data, size_t count) {
  for (size_t i = 0; i < count; ++i) c = TABLE.of[(c ^ data[i]) & 255u] ^ c >> 8;
  return c;
}

#define CT_CLMUL __attribute__((target("pclmul,sse2")))

CT_CLMUL inline __m128i load(const uint8_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

// Moves `far` forward by the bits that `by` was made for, and adds what is there.
CT_CLMUL inline __m128i fold(__m128i far, __m128i by, __m128i there) {
  const __m128i low = _mm_clmulepi64_si128(far, by, 0x00);
  return _mm_xor_si128(_mm_xor_si128(low, _mm_clmulepi64_si128(far, by, 0x11)), there);
}

constexpr size_t WIDE = 64;

// At least WIDE bytes: four lanes of 16 bytes move through them, and end as 16 bytes with the same remainder.
CT_CLMUL uint32_t folded(uint32_t c, const uint8_t* data, size_t count) {
  const __m128i by_wide = _mm_set_epi64x(FOUR_LANES.low, FOUR_LANES.high);
  const __m128i by_lane = _mm_set_epi64x(ONE_LANE.low, ONE_LANE.high);
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(int32_t(c)));
  __m128i b = load(data + 16), d = load(data + 32), e = load(data + 48);
  size_t at = WIDE;
  for (; at + WIDE <= count; at += WIDE) {
    a = fold(a, by_wide, load(data + at));
    b = fold(b, by_wide, load(data + at + 16));
    d = fold(d, by_wide, load(data + at + 32));
    e = fold(e, by_wide, load(data + at + 48));
  }
  const __m128i all = fold(fold(fold(a, by_lane, b), by_lane, d), by_lane, e);
  uint8_t left[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left), all);
  return byte_by_byte(byte_by_byte(0u, left, sizeof left), data + at, count - at);
}

bool works() { return __builtin_cpu_supports("pclmul"); }

uint32_t crc(const uint8_t* data, size_t count) {
  return ~(count < WIDE ? byte_by_byte(~0u, data, count) : folded(~0u, data, count));
}

#elif defined(__aarch64__)

bool works() { return has(CRC32); }

uint32_t crc(const uint8_t* data, size_t count) {
  uint32_t c = ~0u;
  size_t at = 0;
  for (uint64_t eight; at + sizeof eight <= count; at += sizeof eight) {
    std::memcpy(&eight, data + at, sizeof eight);
    asm(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(c) : "r"(eight));
  }
  for (; at < count; ++at) asm(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(c) : "r"(data[at]));
  return ~c;
}

#else

bool works() { return false; }

uint32_t crc(const uint8_t*, size_t) { return 0u; }

#endif

}  // namespace

}  // namespace chatterm

int32_t ct_crc32_works() { return chatterm::works(); }

uint32_t ct_crc32(const uint8_t* data, int64_t count) { return chatterm::crc(data, size_t(count)); }
