"""Which k of n elements are meant: as a bit for each element, or as Elias and Fano's code, whichever is smaller.

That code has the b low bits of each place, packed; and, for the high bits h_0 <= h_1 <= ..., a mask in which bit h_i + i is
set. b, and with it the size, follows from n and k: about 2 + log2(n / k) bits a place.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..core import Bytes
from ..errors import PayloadError


def places_bits(n: int, count: float) -> float:
    """Bits that so many places among n elements take, an expected number of them too; without filling up to bytes."""
    return min(n, _bits(n, count, _low_bits(n, count))) if count else 0.0


def places_bytes(n: int, count: int) -> int:
    """Size of so many places among n elements."""
    low = _low_bits(n, count)
    return min(-(-n // 8), kernels.packed_bytes(count, low) + -(-_mask_bits(n, count, low) // 8)) if count else 0


def encode(places: NDArray[np.int64], n: int) -> Bytes:
    """Packs int64[count], ascending."""
    count = places.size
    if not count:
        return np.empty(0, np.uint8)
    if places_bytes(n, count) == -(-n // 8):
        return kernels.mark(places, n)
    low = _low_bits(n, count)
    high = kernels.mark((places >> low) + np.arange(count), _mask_bits(n, count, low))
    return np.concatenate([kernels.pack(places & (1 << low) - 1, low), high])


def decode(payload: Bytes, n: int, count: int) -> NDArray[np.int64]:
    """int64[count], ascending; the payload has `places_bytes(n, count)` bytes.

    Raises:
        PayloadError: they are not so many different places among n.
    """
    if not count:
        return np.empty(0, np.int64)
    if places_bytes(n, count) == -(-n // 8):
        return _marked(payload, n, count)
    low = _low_bits(n, count)
    split = kernels.packed_bytes(count, low)
    high = _marked(payload[split:], _mask_bits(n, count, low), count) - np.arange(count)
    places: NDArray[np.int64] = (high << low) + kernels.unpack(payload[:split], count, low)
    if places[-1] >= n or (np.diff(places) <= 0).any():
        raise PayloadError(f"{count} places among {n} elements do not ascend, or are beyond them")
    return places


def _low_bits(n: int, count: float) -> int:
    """b: the one of fewest bits in all."""
    if not count:
        return 0
    near = max(0, int(math.log2(max(1.0, n / count))))
    return min((max(0, near - 1), near, near + 1), key=lambda low: _bits(n, count, low))


def _bits(n: int, count: float, low: int) -> float:
    return count * (low + 1) + ((n - 1) >> low)


def _mask_bits(n: int, count: int, low: int) -> int:
    return count + ((n - 1) >> low)


def _marked(payload: Bytes, n: int, count: int) -> NDArray[np.int64]:
    places: NDArray[np.int64] = kernels.marked(payload)
    if places.size != count or places[-1] >= n:
        raise PayloadError(f"a mask of {n} bits has {places.size} set, where {count} are said")
    return places
