"""The door to the kernels: some coarse, pure functions on contiguous float32 vectors.

Nothing above this door does arithmetic on a gradient but through it. Behind it are two sets with the same signatures and
the same bytes: NumPy's, which is the definition, and the compiled one, which is used where it was built.

    HVDCOMPRESS_KERNELS      "numpy" or "native", to use one of them whatever is there
    HVDCOMPRESS_NUM_THREADS  threads of a compiled kernel, 1 unless told: ranks share a machine
    HVDCOMPRESS_ISA          "baseline", "avx2" or "avx512", instead of the best that the processor has
"""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType

from .. import settings
from .atoms import Ordered, add_outer, cosines, draw_atoms, ordered, to_halves, water_level
from .bits import digit_words, mark, marked, pack, pack_digits, packed_bytes, unpack, unpack_digits
from .numpy import (
    TERNARY_RUN,
    all_finite,
    clipped,
    concatenate,
    divide,
    largest,
    level_bits,
    levels_decode_add,
    levels_encode,
    product,
    sketch_accumulate,
    sketch_estimate,
    sum_of_squares,
    ternary_bytes,
    ternary_decode_add,
    ternary_encode,
    ternary_signs,
    top_k,
    weighted_sum,
    zeros,
)
from .pool import empty
from .random import derive_key

__all__ = [
    "TERNARY_RUN",
    "Ordered",
    "add_outer",
    "all_finite",
    "clipped",
    "concatenate",
    "cosines",
    "derive_key",
    "digit_words",
    "divide",
    "draw_atoms",
    "empty",
    "implementation",
    "largest",
    "level_bits",
    "levels_decode_add",
    "levels_encode",
    "mark",
    "marked",
    "ordered",
    "pack",
    "pack_digits",
    "packed_bytes",
    "product",
    "sketch_accumulate",
    "sketch_estimate",
    "sum_of_squares",
    "ternary_bytes",
    "ternary_decode_add",
    "ternary_encode",
    "ternary_signs",
    "to_halves",
    "top_k",
    "unpack",
    "unpack_digits",
    "water_level",
    "weighted_sum",
    "zeros",
]


def _native() -> ModuleType | None:
    """The compiled set, if it is wanted and there."""
    wanted = settings.choice("HVDCOMPRESS_KERNELS", ("numpy", "native"))
    if wanted == "numpy":
        return None
    try:
        native = import_module("._native", __name__)
    except ImportError as error:
        if wanted == "native":
            raise
        warnings.warn(
            f"the compiled kernels are not there ({error}); NumPy's serve, many times slower: install hvdcompress where there "
            "is a C++ compiler, or set HVDCOMPRESS_KERNELS=numpy to accept it",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    native.set_threads(settings.count("HVDCOMPRESS_NUM_THREADS", 1, most=1024))
    native.choose(settings.choice("HVDCOMPRESS_ISA", native.instruction_sets()) or native.instruction_set())
    return native


_compiled = _native()

if _compiled is not None:
    globals().update({name: getattr(_compiled, name) for name in __all__ if hasattr(_compiled, name)})


def implementation() -> str:
    """Which set serves: "numpy", or the instruction set of the compiled one."""
    return "numpy" if _compiled is None else str(_compiled.instruction_set())
