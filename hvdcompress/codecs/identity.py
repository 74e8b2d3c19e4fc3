"""No compression: the elements themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from ..core import Array, Bytes
from ..errors import PayloadError
from .codec import Encoded


@dataclass(frozen=True)
class Identity:
    """x as it is.

    Payload: float32[n], little-endian. Bias: none, and no noise. The yardstick in place of another codec: DORE with it
    both ways is SGD, with it on the way down is DIANA.

    >>> import numpy as np
    >>> Identity().encode(np.ones(3, np.float32), key=0).payload.size
    12
    """

    number: ClassVar[int] = 1
    unbiased: ClassVar[bool] = True
    portable: ClassVar[bool] = True

    @property
    def alignment(self) -> int:
        return 1

    def encode(self, x: Array, key: int, start: int = 0) -> Encoded:
        return Encoded(np.frombuffer(x.astype("<f4").tobytes(), np.uint8), noise=0.0)

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        if payload.size != 4 * out.size:
            raise PayloadError(f"an identity payload of {out.size} elements has {4 * out.size} bytes, not {payload.size}")
        out = out.reshape(-1)
        # A payload may begin anywhere in what was received; kernels want floats that are aligned.
        values = np.ascontiguousarray(payload).view("<f4").astype(np.float32)
        out[:] = kernels.weighted_sum((1.0, out), (factor, values))
        return 1.0

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        return 4.0 * math.prod(shape)
