#define CT_NAME i8mm
#define CT_KERNELS i8mm_kernels
#include "kernels_impl.h"
