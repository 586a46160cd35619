#define CT_NAME avxvnni
#define CT_KERNELS avxvnni_kernels
#include "kernels_impl.h"
