"""Integers of few bits, packed: without gaps, least significant bit first; or as digits of words that can be summed.

And places of elements, as marks in a mask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..core import Array, Bytes

CHUNK = 1 << 14  # integers packed at a time; a multiple of 8, so that each chunk fills whole bytes

Integers = NDArray[np.int64]


def packed_bytes(count: int, width: int) -> int:
    """Size of so many integers."""
    return -(-count * width // 8)


def pack(values: Integers, width: int) -> Bytes:
    """uint8[packed_bytes]: integers from 0 to 2**width - 1; the last byte is filled up with zeros."""
    places, parts = np.arange(width), [np.empty(0, np.uint8)]
    for start in range(0, values.size, CHUNK):
        bits = values[start : start + CHUNK, None] >> places & 1
        parts.append(np.packbits(bits.astype(bool).ravel(), bitorder="little"))
    return np.concatenate(parts)


def unpack(payload: Bytes, count: int, width: int) -> Integers:
    """int64[count]: what `pack` packed; the payload has `packed_bytes(count, width)` bytes."""
    values, weights = np.zeros(count, np.int64), np.int64(1) << np.arange(width)
    for start in range(0, count if width else 0, CHUNK):
        size = min(CHUNK, count - start)
        bits = np.unpackbits(payload[start * width // 8 :], count=size * width, bitorder="little")
        values[start : start + size] = bits.reshape(size, width) @ weights
    return values


def mark(places: Integers, n: int) -> Bytes:
    """uint8[packed_bytes(n, 1)]: a bit for each of n elements, set at the places; whatever is beyond them is zero."""
    mask = np.zeros(n, bool)
    mask[places] = True
    return np.packbits(mask, bitorder="little")


def marked(mask: Bytes) -> Integers:
    """int64[]: the places of the bits that are set, ascending."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little").view(bool))


def digit_words(n: int, ranks: int) -> int:
    """Words that n digits take when so many ranks' are summed."""
    return -(-n // (32 // _digit_bits(ranks)))


def pack_digits(digits: NDArray[np.int8], ranks: int) -> NDArray[np.int32]:
    """int32[words]: digits of -1, 0 and 1 such that words can be summed over the ranks without a carry, nor overflow."""
    bits, words = _digit_bits(ranks), digit_words(digits.size, ranks)
    padded = np.zeros(words * (32 // bits), np.int64)
    padded[: digits.size] = digits
    totals: NDArray[np.int32] = (padded.reshape(words, 32 // bits) << bits * np.arange(32 // bits)).sum(axis=1).astype(np.int32)
    return totals


def unpack_digits(words: NDArray[np.int32], n: int, ranks: int) -> Array:
    """float32[n]: the digits of a sum over ranks, whole numbers from -ranks to ranks."""
    bits = _digit_bits(ranks)
    places = bits * np.arange(32 // bits)
    raised = words.astype(np.int64)[:, None] + (np.int64(ranks) << places).sum()
    digits: Array = ((raised >> places & (1 << bits) - 1) - ranks).ravel()[:n].astype(np.float32)
    return digits


def _digit_bits(ranks: int) -> int:
    return (2 * ranks).bit_length()
