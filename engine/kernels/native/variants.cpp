// Lists the compiled variants, and which of them this machine runs.
#include "kernels.h"

namespace chatterm {

namespace {

struct Variant {
  const Kernels* kernels;
  bool (*works)();
};

#ifndef CT_HAS  // where instructions are emulated, as in tests/engine/native/emulated.py
#define CT_HAS(feature) __builtin_cpu_supports(feature)
#endif

bool has_avx2() { return CT_HAS("avx2") && CT_HAS("fma") && CT_HAS("f16c"); }

bool has_avx512() {
  return has_avx2() && CT_HAS("avx512f") && CT_HAS("avx512bw") && CT_HAS("avx512vl") && CT_HAS("avx512dq") &&
         CT_HAS("avx512vnni");
}

const Variant variants[] = {
    {&portable_kernels, [] { return true; }},
#ifdef CT_HAVE_AVX2
    {&avx2_kernels, has_avx2},
#endif
#ifdef CT_HAVE_AVXVNNI
    {&avxvnni_kernels, [] { return has_avx2() && CT_HAS("avxvnni"); }},
#endif
#ifdef CT_HAVE_AVX512
    {&avx512_kernels, has_avx512},
#endif
#ifdef CT_HAVE_AVX512BF16
    {&avx512bf16_kernels, [] { return has_avx512() && CT_HAS("avx512bf16"); }},
#endif
};

constexpr int32_t COUNT = int32_t(sizeof variants / sizeof *variants);

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

int32_t ct_variant_works(int32_t variant) { return variant >= 0 && variant < COUNT && variants[variant].works(); }

const char* ct_source_hash() { return CT_SOURCE_HASH; }
