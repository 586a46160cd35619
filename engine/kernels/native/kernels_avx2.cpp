#define CT_NAME avx2
#define CT_KERNELS avx2_kernels
#include "kernels_impl.h"
