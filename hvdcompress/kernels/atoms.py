"""Sampling of atoms: water-filling, draws, the cosines' basis, outer products, halves.

What a decoder computes is float32 in a fixed order, like all of `numpy.py`. What only an encoder computes may be float64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core import Array
from .numpy import flush
from .random import block_keys, uniforms

PI = 314159265358979323846264338327950288419716939937510  # times 1e50
FINE = 1 << 100  # fixed point of the cosines


class Ordered(NamedTuple):
    """The largest magnitudes in descending order.

    Attributes:
        descending: float64[k], |lambda_1| >= |lambda_2| >= ...
        left: float64[k], the sum of |lambda_j| over j >= i, to the last of all.
        nonzeros: how many there are in all.
    """

    descending: NDArray[np.float64]
    left: NDArray[np.float64]
    nonzeros: int


def ordered(magnitudes: Array, largest: NDArray[np.int64]) -> Ordered:
    """Puts in order float32[n] of |lambda_i|, of which int64[k] are the places of the largest, as of `top_k`."""
    rest = magnitudes.copy()
    rest[largest] = 0
    descending = np.sort(magnitudes[largest])[::-1].astype(np.float64)
    left = rest.sum(dtype=np.float64) + np.cumsum(descending[::-1])[::-1]
    return Ordered(descending, left, np.count_nonzero(magnitudes))


def water_level(magnitudes: Ordered, budget: float) -> float:
    """The level M for which p_i = min(1, |lambda_i| / M) sums to the budget.

    Of all probabilities with that sum, these have the least variance, sum lambda_i^2 (1 / p_i - 1).

    Args:
        magnitudes: at least as many of the largest ones as the budget.
        budget: expected number of atoms, positive; may be fractional, and less than one.

    Returns:
        M, or 0.0 if the budget is enough for every atom that is not zero.

    Source: H. Wang, S. Sievert, Z. Charles, S. Liu, S. Wright, D. Papailiopoulos, "ATOMO: Communication-efficient Learning
    via Atomic Sparsification", 2018 (the ATOMO probabilities).
    """
    if budget >= magnitudes.nonzeros:
        return 0.0
    k = math.ceil(budget)  # no more than that many atoms can have p = 1
    room = budget - np.arange(k)
    first = int(np.argmax(magnitudes.descending[:k] * room <= magnitudes.left[:k]))  # at the last one it always holds
    return float(magnitudes.left[first] / room[first])


def draw_atoms(magnitudes: Array, level: float, key: int) -> NDArray[np.bool_]:
    """bool[n]: which atoms are drawn, each with probability min(1, |lambda| / level); all that are not zero at level 0.

    The draws are those of `ternary_encode` for one block of n elements, with 23 bits more.
    """
    coarse, fine = (uniforms(block_keys(key, block, 1), magnitudes.size)[0].astype(np.float64) for block in (0, 1))
    chosen: NDArray[np.bool_] = ((coarse + (fine - 0.5) * 2.0**-23) * level < magnitudes) & (magnitudes > 0)
    return chosen


def add_outer(out: Array, u: Array, v: Array) -> None:
    """Adds u v^T to float32[m, n], in place."""
    v = flush(v.copy())
    with np.errstate(over="ignore", invalid="ignore"):
        for row, factor in zip(out, flush(u.copy())):
            row[:] = flush(flush(row) + flush(factor * v))


def to_halves(x: Array, key: int) -> NDArray[np.float16]:
    """float16[n]: each element rounded up or down at random, so that it is its own mean. |x| is at most 1."""
    u = uniforms(block_keys(key, 0, 1), x.size)[0]
    magnitudes = np.abs(x)
    cut = (magnitudes.view(np.uint32) + (u * np.float32(1 << 13)).astype(np.uint32)) & np.uint32(0xFFFFE000)
    small = np.floor(magnitudes * np.float32(2.0**24) + u) * np.float32(2.0**-24)  # where halves are subnormal
    rounded = np.where(magnitudes < np.float32(2.0**-14), small, cut.view(np.float32))
    return np.copysign(rounded, x).astype(np.float16)


@lru_cache(maxsize=32)
def cosines(n: int) -> Array:
    """float32[n, n]: row k is the k-th basis vector of the DCT-II; the same bits on every processor."""
    quarter = [_cosine(j, 2 * n) for j in range(n + 1)]
    half = quarter + [-c for c in reversed(quarter[:-1])]  # cos(pi j / 2n), j = 0 ... 2n
    table = np.array(half + half[-2:0:-1])
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    matrix = table[k * (2 * i + 1) % (4 * n)] * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    basis: Array = matrix.astype(np.float32)
    return basis


def _cosine(j: int, n: int) -> float:
    """cos(pi j / n) for 0 <= j <= n / 2, from its series in whole numbers: no processor rounds them its own way."""
    square = (PI * FINE * j // (n * 10**50)) ** 2 // FINE
    total, term, i = 0, FINE, 0
    while term:
        total += term if i % 2 == 0 else -term
        i += 1
        term = term * square // FINE // (2 * i * (2 * i - 1))
    return total / FINE
