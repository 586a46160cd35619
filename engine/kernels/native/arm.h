// What the ARM processor that this runs on has.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace chatterm {

// Bits of the kernel's interface (asm/hwcap.h), which older headers do not name, and the name on a Mac.
struct ArmFeature {
  unsigned long first, second;
  const char* name;
};

constexpr ArmFeature CRC32{1ul << 7, 0, "hw.optional.armv8_crc32"};
constexpr ArmFeature DOTPROD{1ul << 20, 0, "hw.optional.arm.FEAT_DotProd"};
constexpr ArmFeature I8MM{0, 1ul << 13, "hw.optional.arm.FEAT_I8MM"};

inline bool has(const ArmFeature& feature) {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & feature.first) == feature.first &&
         (getauxval(AT_HWCAP2) & feature.second) == feature.second;
#elif defined(__APPLE__)
  int32_t found = 0;
  size_t size = sizeof found;
  return sysctlbyname(feature.name, &found, &size, nullptr, 0) == 0 && found != 0;
#else
  (void)feature;
  return false;
#endif
}

}  // namespace chatterm
