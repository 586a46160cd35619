#define CT_NAME dotprod
#define CT_KERNELS dotprod_kernels
#include "kernels_impl.h"
