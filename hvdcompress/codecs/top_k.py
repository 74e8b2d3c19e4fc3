"""The k largest elements, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels, options
from ..core import Array, Bytes
from ..errors import PayloadError
from . import places
from .codec import Encoded


@dataclass(frozen=True)
class TopK:
    """The k elements of largest magnitude as they are, the others zero; of equal ones the first are taken.

    Payload: their places (about 2 + log2(n / k) bits each, or a bit for each of the n elements, whichever is smaller),
    then float32[k]. Bias: a contraction, ||Q(x) - x||^2 <= (1 - k / n) ||x||^2; it needs error feedback.
    Memory: none. It sees the whole tensor, and cannot be cut.

    Args:
        ratio: k over n, in (0, 1]; k is at least 1.
        k: instead of `ratio`.

    Raises:
        ValueError: an option is out of its range.

    >>> import numpy as np
    >>> out = np.zeros(4, np.float32)
    >>> codec = TopK(k=2)
    >>> codec.decode_add(codec.encode(np.float32([1, -3, 0.5, 2]), key=0).payload, out), out.tolist()
    (0.5, [0.0, -3.0, 0.0, 2.0])
    """

    number: ClassVar[int] = 4
    unbiased: ClassVar[bool] = False
    portable: ClassVar[bool] = True

    ratio: float = 0.01
    k: int | None = None

    def __post_init__(self) -> None:
        options.number("ratio", self.ratio, 0, 1, above=True)
        if self.k is not None:
            options.whole("k", self.k, 1)

    @property
    def alignment(self) -> int:
        return 0

    def chosen(self, n: int) -> int:
        """k for n elements."""
        return min(n, max(1, round(self.ratio * n)) if self.k is None else self.k)

    def encode(self, x: Array, key: int, start: int = 0) -> Encoded:
        x = x.reshape(-1)
        where = kernels.top_k(x, self.chosen(x.size))
        values = x[where]
        payload = np.concatenate([places.encode(where, x.size), values.astype("<f4").view(np.uint8)])
        return Encoded(payload, max(0.0, kernels.sum_of_squares(x) - kernels.sum_of_squares(values)))

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        out, n = out.reshape(-1), out.size
        k = self.chosen(n)
        if payload.size != self.expected_bytes((n,)):
            raise PayloadError(
                f"the {k} largest of {n} elements have {self.expected_bytes((n,)):.0f} bytes of payload, not {payload.size}"
            )
        head = places.places_bytes(n, k)
        where = places.decode(payload[:head], n, k)
        values = np.ascontiguousarray(payload[head:]).view("<f4").astype(np.float32)
        out[where] = kernels.weighted_sum((1.0, out[where]), (factor, values))
        return k / max(1, n)

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        n = math.prod(shape)
        return places.places_bytes(n, self.chosen(n)) + 4.0 * self.chosen(n)
