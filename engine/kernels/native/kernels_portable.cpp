#define CT_NAME portable
#define CT_KERNELS portable_kernels
#include "kernels_impl.h"
