"""Which of n elements are meant: as a bit for each element, or as packed numbers, whichever is smaller."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..core import Bytes
from ..errors import PayloadError


def width(n: int) -> int:
    """Bits of a number below n."""
    return max(0, n - 1).bit_length()


def places_bytes(n: int, count: int) -> int:
    """Size of so many places among n elements."""
    return min(-(-n // 8), kernels.packed_bytes(count, width(n)))


def encode(places: NDArray[np.int64], n: int) -> Bytes:
    """Packs int64[count], ascending."""
    if _as_mask(n, places.size):
        mask = np.zeros(n, bool)
        mask[places] = True
        return np.packbits(mask, bitorder="little")
    return kernels.pack(places, width(n))


def decode(payload: Bytes, n: int, count: int) -> NDArray[np.int64]:
    """int64[count], ascending; the payload has `places_bytes(n, count)` bytes.

    Raises:
        PayloadError: they are not so many different places among n.
    """
    if _as_mask(n, count):
        mask = np.unpackbits(payload, bitorder="little").view(bool)
        places: NDArray[np.int64] = np.flatnonzero(mask)
        if places.size != count or mask[n:].any():
            raise PayloadError(f"a mask of {n} elements marks {places.size} of them, where {count} are said")
        return places
    places = kernels.unpack(payload, count, width(n))
    if count and (places[-1] >= n or (np.diff(places) <= 0).any()):
        raise PayloadError(f"{count} places among {n} elements do not ascend, or are beyond them")
    return places


def _as_mask(n: int, count: int) -> bool:
    return -(-n // 8) < kernels.packed_bytes(count, width(n))
