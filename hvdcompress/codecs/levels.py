"""Blockwise stochastic rounding to equidistant levels of a norm, packed to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .. import kernels, options
from ..core import Array, Bytes
from .codec import Encoded
from .norms import check_blocks


@dataclass(frozen=True)
class Levels:
    """Q(x)_j = M sign(x_j) l_j / levels, with l_j one of the two whole numbers around levels |x_j| / M, E l_j that itself.

    M is a norm of the block of x_j.

    Payload: float32 a block; then for each element one of 2 levels + 1 codes, in ceil(log2(2 levels + 1)) bits. (QSGD's
    paper has Elias codes as well, which pay where nearly all elements are zero; there one level and `Ternary`'s mask
    are as small.) Bias: none; E||Q(x) - x||^2 = sum of (M / levels)^2 f (1 - f), f the fraction above the lower level.
    Memory: none.

    Args:
        levels: from 1 to 32767. 7 are 4 bits an element, 127 are 8.
        block: elements that share a norm: the paper's bucket.
        norm: "l2" as in the paper's theory, or "max", which has less noise.

    Raises:
        ValueError: an option is out of its range.

    >>> import numpy as np
    >>> Levels(levels=7, block=512).encode(np.ones(1024, np.float32), key=0).payload.size
    520

    Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding", 2017, section 3.1.
    """

    number: ClassVar[int] = 3
    unbiased: ClassVar[bool] = True
    portable: ClassVar[bool] = True

    levels: int = 7
    block: int = 512
    norm: str = "l2"

    def __post_init__(self) -> None:
        check_blocks(self.block, self.norm)
        options.whole("levels", self.levels, 1, (1 << 15) - 1)

    @property
    def alignment(self) -> int:
        return self.block

    def encode(self, x: Array, key: int, start: int = 0) -> Encoded:
        x, l2 = x.reshape(-1), self.norm == "l2"
        return Encoded(*kernels.levels_encode(x, self.block, self.levels, key, start // self.block, l2))

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        nonzeros = kernels.levels_decode_add(payload, out.reshape(-1), self.block, self.levels, factor)
        return nonzeros / max(1, out.size)

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        n = math.prod(shape)
        return 4 * -(-n // self.block) + kernels.packed_bytes(n, kernels.level_bits(self.levels))
