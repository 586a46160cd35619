#pragma once

#include "kernels.h"

namespace chatterm {

// The kernels of a variant; null when this machine does not run it.
const Kernels* kernels_of(int32_t variant);

}  // namespace chatterm
