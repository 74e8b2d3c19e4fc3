#include "kernels.h"

#define HVDCOMPRESS_ISA baseline
#include "implementation.h"
