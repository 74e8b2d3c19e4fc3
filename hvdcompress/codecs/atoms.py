"""Sparsification in any basis: a tensor as a sum of atoms, few of which are sent, such that it stays its own mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import kernels, options
from ..core import Array, Bytes
from ..errors import CompressionError, PayloadError
from . import places
from .codec import Encoded
from .identity import Identity

UNITS = ("atoms", "bytes", "ratio")
NORM_BUDGETS = ("l2", "max")
IDENTITY = Identity()
DENSE = 0xFFFFFFFF  # in place of a number of atoms: the tensor itself follows
COUNT_BYTES = 4
LEAST_BYTES = 32
BISECTIONS = 24  # for the number of atoms that a budget in bytes is enough for


@dataclass(frozen=True)
class Atoms:
    """x = sum lambda_i a_i with unit-norm atoms a_i; sent is sum over drawn i of (lambda_i / p_i) a_i.

    p_i = min(1, |lambda_i| / M), with the level M for which they sum to the budget s ("water filling"): unbiased, and of
    all p with that sum those with the least variance, E||Q(x) - x||^2 = sum |lambda_i| (M - |lambda_i|) over |lambda_i| < M.
    Nothing drawn is a message like others, or the mean would not be x. A tensor whose atoms are expected to take more
    bytes than itself is sent as it is. It sees the whole tensor, and cannot be cut.

    Args:
        budget: per tensor, positive, in `unit`; or "l2" or "max": s = ||lambda||_1 over ||lambda||_2 or max|lambda_i|, for
            which M is that norm: with entries as atoms QSGD of one level, and TernGrad.
        unit: "atoms" (expected number; may be fractional), "bytes" (expected size of the payload), or "ratio" (that over
            the size of the tensor in float32).

    Raises:
        ValueError: an option is out of its range.

    Source: H. Wang, S. Sievert, Z. Charles, S. Liu, S. Wright, D. Papailiopoulos, "ATOMO: Communication-efficient Learning
    via Atomic Sparsification", 2018.
    """

    unbiased: ClassVar[bool] = True
    portable: ClassVar[bool] = False  # sums and factors are NumPy's, BLAS's and LAPACK's

    budget: float | str = 3.0
    unit: str = "atoms"

    def __post_init__(self) -> None:
        options.choice("unit", self.unit, UNITS)
        if isinstance(self.budget, str):
            options.choice("budget", self.budget, ("a number", *NORM_BUDGETS))
        else:
            in_bytes, most = self.unit == "bytes", 1.0 if self.unit == "ratio" else math.inf
            options.number(f"budget in {self.unit}", self.budget, LEAST_BYTES if in_bytes else 0, most, above=not in_bytes)

    @property
    def alignment(self) -> int:
        return 0

    def _expected_atoms(self, magnitudes: Array) -> float | None:
        """s, where the budget says it without the size of an atom."""
        if self.unit == "atoms" and not isinstance(self.budget, str):
            return self.budget
        if not isinstance(self.budget, str):
            return None
        total = float(magnitudes.sum(dtype=np.float64))
        squares = float(np.square(magnitudes, dtype=np.float64).sum())
        norm = math.sqrt(squares) if self.budget == "l2" else float(magnitudes.max(initial=0))
        return total / norm if norm else 1.0

    def _bytes(self, n: int) -> float:
        """The budget as a size, for a tensor of n elements."""
        assert not isinstance(self.budget, str)
        return max(LEAST_BYTES, self.budget * 4 * n) if self.unit == "ratio" else self.budget


def dense_payload(x: Array) -> Encoded:
    """The tensor itself."""
    payload, noise = IDENTITY.encode(x, key=0)
    return Encoded(np.concatenate([np.array([DENSE], "<u4").view(np.uint8), payload]), noise)


def decode_dense(payload: Bytes, out: Array, factor: float) -> None:
    """Adds what `dense_payload` packed."""
    IDENTITY.decode_add(payload[COUNT_BYTES:], out, factor)


def count_bytes(*counts: int) -> Bytes:
    """uint32 each; raises CompressionError where one is too large."""
    if max(counts) >= DENSE:
        raise CompressionError(f"{max(counts)} atoms of a tensor are more than a payload can count: use a smaller budget")
    return np.array(counts, "<u4").view(np.uint8)


def read_count(payload: Bytes, at: int = 0) -> int:
    """The uint32 at a place of a payload."""
    if payload.size < at + COUNT_BYTES:
        raise PayloadError(f"a payload of atoms has at least {at + COUNT_BYTES} bytes, not {payload.size}")
    return int.from_bytes(payload[at : at + COUNT_BYTES].tobytes(), "little")


def water_level(magnitudes: Array, budget: float) -> float:
    """M for float32[n] of |lambda_i| and a number of atoms."""
    most = min(magnitudes.size, math.ceil(budget))
    return kernels.water_level(kernels.ordered(magnitudes, kernels.top_k(magnitudes, most)), budget)


def _float32(x: float) -> float:
    """x as the nearest float32, or infinite."""
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def level_noise(magnitudes: Array, level: float) -> float:
    """The variance of drawing each atom with p = min(1, |lambda| / level)."""
    drawn = np.minimum(magnitudes, np.float32(level))  # those with p = 1 then count for nothing
    return max(0.0, level * float(drawn.sum(dtype=np.float64)) - kernels.sum_of_squares(drawn))


@dataclass(frozen=True)
class Entrywise(Atoms):
    """The elements themselves as atoms.

    Payload: uint32 each, how many elements are larger than M and how many others were drawn; float32 M, the magnitude that
    all of the latter get; the places of the former (see places.py: about 2 + log2(n / k) bits each) and float32
    each; the places of the latter and a bit each (1: negative). Bias: none. Memory: none.

    >>> import numpy as np
    >>> out = np.zeros(100, np.float32)
    >>> codec = Entrywise(budget=5)
    >>> _ = codec.decode_add(codec.encode(np.linspace(0, 1, 100, dtype=np.float32), key=0).payload, out)
    >>> np.unique(out).round(3).tolist()
    [0.0, 10.0]
    """

    number: ClassVar[int] = 6

    HEADER_BYTES: ClassVar[int] = 12

    def encode(self, x: Array, key: int, start: int = 0) -> Encoded:
        atoms = self._analysed(kernels.weighted_sum((1.0, x.reshape(-1))))  # without subnormal numbers
        magnitudes = np.abs(atoms)
        if not kernels.all_finite(magnitudes):
            return dense_payload(x)
        level = self._level(magnitudes)
        if not math.isfinite(level):
            return dense_payload(x)
        exact = magnitudes > level  # an element that is M itself is drawn for certain, and costs a sign only
        drawn = kernels.draw_atoms(magnitudes, level, key) & ~exact if level else np.zeros(atoms.size, bool)
        others = float(np.minimum(magnitudes, np.float32(level)).sum(dtype=np.float64)) / level - exact.sum() if level else 0.0
        if self._size(atoms.size, int(exact.sum()), others) >= 4 * x.size:
            return dense_payload(x)
        exact_places, drawn_places = np.flatnonzero(exact), np.flatnonzero(drawn)
        payload = np.concatenate(
            [
                count_bytes(exact_places.size, drawn_places.size),
                np.array([level], "<f4").view(np.uint8),
                places.encode(exact_places, atoms.size),
                atoms[exact_places].astype("<f4").view(np.uint8),
                places.encode(drawn_places, atoms.size),
                np.packbits(atoms[drawn_places] < 0, bitorder="little"),
            ]
        )
        return Encoded(payload, level_noise(magnitudes, level))

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        n = out.size
        if read_count(payload) == DENSE:
            decode_dense(payload, out, factor)
            return (payload.size - COUNT_BYTES) / max(1, 4 * out.size)
        exact, drawn = read_count(payload), read_count(payload, 4)
        sizes = [self.HEADER_BYTES, places.places_bytes(n, exact), 4 * exact, places.places_bytes(n, drawn), -(-drawn // 8)]
        if max(exact, drawn) > n or payload.size != sum(sizes):
            raise PayloadError(
                f"a payload of {exact} and {drawn} atoms among {n} has {sum(sizes)} bytes, not {payload.size}, and no more atoms"
            )
        head, where, values, others, signs = np.split(payload, np.cumsum(sizes)[:-1])
        exact_places, drawn_places = places.decode(where, n, exact), places.decode(others, n, drawn)
        if np.intersect1d(exact_places, drawn_places, assume_unique=True).size:
            raise PayloadError("a payload of atoms has some of them twice")
        atoms = kernels.zeros(n)
        atoms[exact_places] = np.ascontiguousarray(values).view("<f4")
        level = np.ascontiguousarray(head[8:]).view("<f4")[0]
        negative = np.unpackbits(signs, bitorder="little", count=drawn).astype(bool)
        atoms[drawn_places] = np.where(negative, -level, level)
        self._add_synthesis(atoms, np.union1d(exact_places, drawn_places), out.reshape(-1), factor)
        return (payload.size - COUNT_BYTES) / max(1, 4 * out.size)

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        """The density is that of the payload's bytes after the count: 1 for as many as the tensor itself has."""
        n = math.prod(shape)
        if not n:
            return COUNT_BYTES
        if density is not None:
            return COUNT_BYTES + density * 4 * n
        if isinstance(self.budget, str):  # of a Gaussian vector
            norm = math.sqrt(n) if self.budget == "l2" else math.sqrt(2 * math.log(n + 1))
            expected = self._size(n, 0, min(n, n * math.sqrt(2 / math.pi) / norm))
        else:
            expected = self._size(n, 0, min(n, self.budget)) if self.unit == "atoms" else self._bytes(n)
        return min(COUNT_BYTES + 4.0 * n, expected)

    def _size(self, n: int, exact: float, drawn: float) -> float:
        """Bytes of a payload, before its parts are filled up to whole bytes."""
        bits = places.places_bits(n, exact) + 32 * exact + places.places_bits(n, drawn) + drawn
        return self.HEADER_BYTES + bits / 8

    def _level(self, magnitudes: Array) -> float:
        """M, a float32; infinite if it is too large for one."""
        expected, n = self._expected_atoms(magnitudes), magnitudes.size
        if expected is not None:
            return _float32(water_level(magnitudes, expected))
        wanted = self._bytes(n)
        most = min(n, int(4 * wanted))  # a place and a sign take two bits at least
        in_order = kernels.ordered(magnitudes, kernels.top_k(magnitudes, most))
        if self._size(n, in_order.nonzeros, 0) <= wanted:
            return 0.0
        low, high = 0.0, float(min(most, in_order.nonzeros))  # of the number of atoms: more of them, more bytes
        level = _float32(kernels.water_level(in_order, high * 2.0**-BISECTIONS)) if high else 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            tried = _float32(kernels.water_level(in_order, middle)) if middle else 0.0
            exact = float(np.searchsorted(-in_order.descending, -tried, side="left"))  # larger than the level
            if self._size(n, exact, middle - exact) <= wanted:
                low, level = middle, tried
            else:
                high = middle
        return level

    def _analysed(self, x: Array) -> Array:
        """float32[n]: the coefficients lambda."""
        return x

    def _add_synthesis(self, atoms: Array, where: NDArray[np.int64], out: Array, factor: float) -> None:
        """Adds factor times the sum of the atoms, which are zero but at int64[...] `where`."""
        out[where] = kernels.weighted_sum((1.0, out[where]), (factor, atoms[where]))


@dataclass(frozen=True)
class Fourier(Entrywise):
    """The vectors of the orthonormal cosine transform (DCT-II) as atoms, of each `block` elements in order.

    Payload: that of `Entrywise`, for the coefficients. Bias: none. Memory: none.

    Args:
        block: elements that are transformed together; the last block may be shorter.
    """

    number: ClassVar[int] = 7

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        options.whole("block", self.block, 1, 1024)

    def _analysed(self, x: Array) -> Array:
        rows = [kernels.product(part, np.ascontiguousarray(kernels.cosines(part.shape[1]).T)) for part in self._blocks(x)]
        return kernels.concatenate([part.reshape(-1) for part in rows])

    def _add_synthesis(self, atoms: Array, where: NDArray[np.int64], out: Array, factor: float) -> None:
        touched, start = np.unique(where // self.block), 0
        for part, target in zip(self._blocks(atoms), self._blocks(out)):
            mine = touched[(touched >= start) & (touched < start + len(part))] - start
            rows = kernels.product(np.ascontiguousarray(part[mine]), kernels.cosines(part.shape[1]))
            target[mine] = kernels.weighted_sum((1.0, target[mine]), (factor, rows)).reshape(rows.shape)
            start += len(part)

    def _blocks(self, x: Array) -> Iterator[Array]:
        """Views of a vector as float32[blocks, block], and as float32[1, rest] of what is left over."""
        whole = x.size // self.block * self.block
        if whole:
            yield x[:whole].reshape(-1, self.block)
        if whole < x.size:
            yield x[whole:].reshape(1, -1)
