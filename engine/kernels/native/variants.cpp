// Lists the compiled variants, and which of them this machine runs.
#include "kernels.h"

#ifdef __x86_64__
#include <cpuid.h>
#elif defined(__aarch64__)
#include "arm.h"
#endif

namespace chatterm {

namespace {

struct Variant {
  const Kernels* kernels;
  bool (*works)();
};

#ifdef CT_EMULATED  // as in tests/engine/native/emulated.py
constexpr bool EMULATED = true;
#else
constexpr bool EMULATED = false;
#endif

#ifdef __x86_64__

enum Register { EAX, EBX, ECX, EDX };

// Returns whether the processor says so: compilers up to clang 18 and GCC 10 do not know each of these names.
bool has_bit(uint32_t leaf, uint32_t part, Register from, int bit) {
  uint32_t found[4];
  return __get_cpuid_count(leaf, part, &found[EAX], &found[EBX], &found[ECX], &found[EDX]) && found[from] >> bit & 1;
}

// Unlike a bit, __builtin_cpu_supports includes that the system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_bit(1, 0, ECX, 29);  // F16C
}

bool has_avxvnni() { return has_avx2() && has_bit(7, 1, EAX, 4); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_bit(7, 0, ECX, 11);  // VNNI
}

bool has_avx512bf16() { return has_avx512() && has_bit(7, 1, EAX, 5); }

#elif defined(__aarch64__)

bool has_dotprod() { return has(DOTPROD); }

bool has_i8mm() { return has(DOTPROD) && has(I8MM); }

#endif

const Variant variants[] = {
    {&portable_kernels, [] { return true; }},
#ifdef CT_HAVE_AVX2
    {&avx2_kernels, has_avx2},
#endif
#ifdef CT_HAVE_AVXVNNI
    {&avxvnni_kernels, has_avxvnni},
#endif
#ifdef CT_HAVE_AVX512
    {&avx512_kernels, has_avx512},
#endif
#ifdef CT_HAVE_AVX512BF16
    {&avx512bf16_kernels, has_avx512bf16},
#endif
#ifdef CT_HAVE_DOTPROD
    {&dotprod_kernels, has_dotprod},
#endif
#ifdef CT_HAVE_I8MM
    {&i8mm_kernels, has_i8mm},
#endif
};

constexpr int32_t COUNT = int32_t(sizeof variants / sizeof *variants);

struct Works {
  bool of[COUNT];
  Works() {
    for (int32_t i = 0; i < COUNT; ++i) of[i] = EMULATED || variants[i].works();
  }
};

// Asks the processor once: within a virtual machine, every question takes some microseconds.
bool works(int32_t variant) {
  static const Works found;
  return found.of[variant];
}

}  // namespace

const Kernels* kernels_of(int32_t variant) {
  return ct_variant_works(variant) ? variants[variant].kernels : nullptr;
}

}  // namespace chatterm

using namespace chatterm;

int32_t ct_variants() { return COUNT; }

const char* ct_variant_name(int32_t variant) {
  return variant >= 0 && variant < COUNT ? variants[variant].kernels->name : nullptr;
}

int32_t ct_variant_works(int32_t variant) {
  return variant >= 0 && variant < COUNT && works(variant);
}

const char* ct_source_hash() { return CT_SOURCE_HASH; }
