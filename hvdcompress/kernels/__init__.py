"""The door to the kernels: some coarse, pure functions on contiguous float32 vectors.

Nothing above this door does arithmetic on a gradient but through it, so another set with the same signatures and the
same bytes can take the place of the NumPy one, which is the definition.
"""

from .numpy import (
    TERNARY_RUN,
    all_finite,
    divide,
    sum_of_squares,
    ternary_bytes,
    ternary_decode_add,
    ternary_encode,
    ternary_noise,
    weighted_sum,
    zeros,
)
from .random import derive_key

__all__ = [
    "TERNARY_RUN",
    "all_finite",
    "derive_key",
    "divide",
    "sum_of_squares",
    "ternary_bytes",
    "ternary_decode_add",
    "ternary_encode",
    "ternary_noise",
    "weighted_sum",
    "zeros",
]
