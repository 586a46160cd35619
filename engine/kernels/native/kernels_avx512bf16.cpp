#define CT_NAME avx512bf16
#define CT_KERNELS avx512bf16_kernels
#include "kernels_impl.h"
