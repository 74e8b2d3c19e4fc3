"""Blockwise Bernoulli quantisation: three symbols, a bit mask and the signs of the non-zeros."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .. import kernels, options
from ..core import Array, Bytes
from .codec import Encoded
from .norms import check_blocks

USUAL_DENSITY = 0.25  # share of non-zeros: 0.26 for Gaussian blocks of 256, less for gradients of trained networks


@dataclass(frozen=True)
class Ternary:
    """Q(x)_j = M sign(x_j) xi_j with xi_j ~ Bernoulli(|x_j| / M), M a norm of the block of x_j, by default max|x|.

    Payload: scales (float32 a block; or a byte a block and a byte for every 16 blocks, M then being rounded up to
    2^(e/8)), ceil(n/8) bytes of mask (uint8, bit 1: not zero), ceil(nonzeros/8) bytes of signs (bit 1: negative).
    Bias: none, whatever the rounding of M: E Q(x) = x and E||Q(x) - x||^2 = sum over blocks of ||x||_1 M - ||x||^2.
    With the maximum norm and float32 scales ||Q(x) - x||_inf <= ||x||_inf; with bytes, <= 2^(1/8) ||x||_inf.
    Memory: none.

    Args:
        block: elements that share a scale, at least 1; 256 is what DORE's experiments use.
        scales: "float32" or "byte".
        norm: "max", or "l2": fewer non-zeros and more noise; QSGD with one level.

    Raises:
        ValueError: an option is out of its range.

    >>> import numpy as np
    >>> x = np.array([4, -4, 0, 0], np.float32)
    >>> payload = Ternary(block=4).encode(x, key=1).payload
    >>> out = np.zeros(4, np.float32)
    >>> Ternary(block=4).decode_add(payload, out), payload.size, out.tolist()
    (0.5, 6, [4.0, -4.0, 0.0, 0.0])

    Source: X. Liu, Y. Li, J. Tang, M. Yan, "A Double Residual Compression Algorithm for Efficient Distributed
    Learning", 2020, section 3 (Bernoulli p-norm quantisation, with p = infinity).
    """

    number: ClassVar[int] = 2
    unbiased: ClassVar[bool] = True
    portable: ClassVar[bool] = True

    block: int = 256
    scales: str = "float32"
    norm: str = "max"

    def __post_init__(self) -> None:
        check_blocks(self.block, self.norm)
        options.choice("scales", self.scales, ("float32", "byte"))

    @property
    def alignment(self) -> int:
        return self.block * (kernels.TERNARY_RUN if self._byte_scales else 1)

    @property
    def _byte_scales(self) -> bool:
        return self.scales == "byte"

    def encode(self, x: Array, key: int, start: int = 0, minus: Array | None = None) -> Encoded:
        first, l2 = start // self.block, self.norm == "l2"
        return Encoded(*kernels.ternary_encode(x.reshape(-1), self.block, key, first, self._byte_scales, l2, minus))

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0, base: Array | None = None) -> float:
        base = None if base is None else base.reshape(-1)
        nonzeros = kernels.ternary_decode_add(payload, out.reshape(-1), self.block, factor, self._byte_scales, base)
        return nonzeros / max(1, out.size)

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        n, density = math.prod(shape), USUAL_DENSITY if density is None else density
        return kernels.ternary_bytes(n, self.block, round(density * n), self._byte_scales)
