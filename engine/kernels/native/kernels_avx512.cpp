#define CT_NAME avx512
#define CT_KERNELS avx512_kernels
#include "kernels_impl.h"
