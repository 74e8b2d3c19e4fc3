#include "kernels.h"

#include <immintrin.h>

#define HVDCOMPRESS_ISA avx2
#include "implementation.h"
