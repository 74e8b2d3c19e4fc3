#include "kernels.h"

#include <immintrin.h>

#define HVDCOMPRESS_ISA avx512
#include "implementation.h"
