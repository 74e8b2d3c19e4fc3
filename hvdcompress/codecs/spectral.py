"""Atoms of a matrix: products of its singular vectors, or of another orthonormal basis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import kernels, options
from ..core import Array, Bytes
from ..errors import PayloadError
from .atoms import COUNT_BYTES, DENSE, Atoms, count_bytes, decode_dense, dense_payload, level_noise, read_count, water_level
from .codec import Encoded

RESHAPES = ("out", "paper")
FACTORS = ("gram", "svd")
VALUES = {"float32": 4, "float16": 2}

SKETCHED = 128  # columns of the sketch that tells small ranks: more than most batches have examples
NEGLIGIBLE = 1e-4  # of the last of them, against the largest: rounding leaves 1e-6, a matrix of full rank 0.1
ROUNDING = 2e-6  # of the Frobenius norm: twice what is left of a product of 64 vectors that was computed in float32


@dataclass(frozen=True)
class Spectral(Atoms):
    """Rank-one matrices as atoms: X = sum sigma_i u_i v_i^T, of the tensor as a matrix X of m x n.

    For any orthonormal q_1 ... q_m, X = sum q_i (q_i^T X) are m orthogonal atoms, whose sum is X to rounding; the variance
    is least for the singular vectors. `factors="gram"` takes the eigenvectors of X X^T, or of X^T X if that is smaller; of a
    matrix whose rank is far below m and n, as a dense layer's gradient's is, which has no more than the batch has examples,
    those in its own column space alone. A tensor for which no basis is found, or whose atoms are not finite, is sent as it is.

    Payload: uint32, the number of atoms drawn; float32[m] and float32[n] an atom, sigma_i / p_i multiplied into the first;
    or float32 and float16[m], float16[n], the unit vectors rounded at random, so that they stay their own means. Bias:
    none but float32's rounding. The expected error leaves the rounding to halves out. Memory: none.

    Args:
        reshape: "out": out x rest, where out is the tensor's first axis or its last, whichever makes m + n smaller.
            "paper": as ATOMO's published code does: (n / 2, 2) for a vector, and (a b / 2, 2 k) for a convolution of a x b
            filters of k elements; (n, 1) and (a b, k) if that is odd; (a, b) for k = 1.
        factors: "gram", or "svd", LAPACK's.
        values: "float16", or "float32": twice the bytes, and no less variance.

    Raises:
        ValueError: an option is out of its range.

    >>> import numpy as np
    >>> x = np.outer(np.arange(1, 9), np.arange(1, 9)).astype(np.float32)
    >>> out = np.zeros_like(x)
    >>> codec = Spectral(budget=1)
    >>> _ = codec.decode_add(codec.encode(x, key=0).payload, out)
    >>> bool(np.allclose(out, x, rtol=2e-3))
    True

    Source: as of `Atoms` (Spectral-ATOMO); the Gram matrix is this project's choice. The column space is found as in N. Halko,
    P.-G. Martinsson, J. A. Tropp, "Finding Structure with Randomness", 2011, Algorithm 4.1.
    """

    number: ClassVar[int] = 8

    reshape: str = "out"
    factors: str = "gram"
    values: str = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("reshape", RESHAPES), ("factors", FACTORS), ("values", tuple(VALUES))):
            options.choice(name, getattr(self, name), known)

    def encode(self, x: Array, key: int, start: int = 0) -> Encoded:
        matrix = kernels.weighted_sum((1.0, x.reshape(-1))).reshape(self.matrix(x.shape))  # without subnormal numbers
        m, n = matrix.shape
        if not x.size or (not isinstance(self.budget, str) and self._size(m, n, self._expected(m, n)) >= 4 * x.size):
            return dense_payload(x)
        largest = float(np.abs(matrix).max())
        if not math.isfinite(largest):
            return dense_payload(x)
        exponent = math.frexp(largest)[1]  # squares must neither overflow nor vanish
        scaled = np.ldexp(matrix, -exponent)
        try:
            basis = basis_of(scaled, self.factors)
        except np.linalg.LinAlgError:
            return dense_payload(x)
        u, sigmas, v = atoms_in(scaled, basis)
        if not kernels.all_finite(sigmas):
            return dense_payload(x)
        expected = self._expected_atoms(sigmas)
        level = water_level(sigmas, self._expected(m, n) if expected is None else expected)
        probabilities = np.minimum(1.0, sigmas / level) if level else (sigmas > 0).astype(np.float64)
        coefficient = math.ldexp(max(level, float(sigmas.max())), exponent)  # the largest, drawn or not
        if self._size(m, n, float(probabilities.sum())) >= 4 * x.size or coefficient > float(np.finfo(np.float32).max):
            return dense_payload(x)
        drawn = np.flatnonzero(kernels.draw_atoms(sigmas, level, key))
        coefficients = np.ldexp(np.maximum(sigmas[drawn].astype(np.float64), level), exponent).astype(np.float32)
        payload = np.concatenate([count_bytes(drawn.size), *self._packed(coefficients, u[drawn], v[drawn], key)])
        return Encoded(payload, math.ldexp(level_noise(sigmas, level), 2 * exponent))

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        matrix = out.reshape(self.matrix(out.shape))
        m, n = matrix.shape
        count = read_count(payload)
        if count == DENSE:
            decode_dense(payload, out, factor)
            return (payload.size - COUNT_BYTES) / max(1, self._atom_bytes(m, n) * min(m, n))
        if count > min(m, n):
            raise PayloadError(f"a payload has {count} atoms of a {m} x {n} matrix, which has no more than {min(m, n)}")
        if payload.size != self._size(m, n, count):
            raise PayloadError(
                f"{count} atoms of a {m} x {n} matrix have {self._size(m, n, count):.0f} bytes of payload, not {payload.size}"
            )
        for u, v in self._unpacked(payload[COUNT_BYTES:], count, m, n):
            kernels.add_outer(matrix, kernels.weighted_sum((factor, u)), v)
        return count / max(1, min(m, n))

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        """The density is of atoms; that of a tensor that is sent as it is stands for as many bytes."""
        m, n = self.matrix(shape)
        most = min(m, n)
        if not most:
            return COUNT_BYTES
        if density is not None:
            return self._size(m, n, density * most)
        if isinstance(self.budget, str):
            expected = math.sqrt(most) if self.budget == "l2" else most / 2
        else:
            expected = self._expected(m, n)
            if self._size(m, n, expected) >= 4 * m * n:
                return COUNT_BYTES + 4.0 * m * n
        return min(COUNT_BYTES + 4.0 * m * n, self._size(m, n, min(most, expected)))

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """m and n of a tensor of this shape."""
        size = math.prod(shape)
        if self.reshape == "out":
            if len(shape) < 2:
                return 1, size
            first, last = (shape[0], math.prod(shape[1:])), (math.prod(shape[:-1]), shape[-1])
            return first if sum(first) <= sum(last) else last
        if len(shape) < 2:
            return (size // 2, 2) if size % 2 == 0 else (size, 1)
        filters, elements = shape[0] * shape[1], math.prod(shape[2:])
        if elements == 1:
            return shape[0], shape[1]
        return (filters // 2, 2 * elements) if filters % 2 == 0 else (filters, elements)

    def _expected(self, m: int, n: int) -> float:
        """s, where it does not go by the matrix."""
        if isinstance(self.budget, str):
            return 1.0
        return self.budget if self.unit == "atoms" else (self._bytes(m * n) - COUNT_BYTES) / self._atom_bytes(m, n)

    def _size(self, m: int, n: int, atoms: float) -> float:
        return COUNT_BYTES + atoms * self._atom_bytes(m, n)

    def _atom_bytes(self, m: int, n: int) -> int:
        return VALUES[self.values] * (m + n) + (4 if self.values == "float16" else 0)

    def _packed(self, coefficients: Array, u: Array, v: Array, key: int) -> list[Bytes]:
        if self.values == "float32":
            return [part.astype("<f4").reshape(-1).view(np.uint8) for part in (coefficients[:, None] * u, v)]
        halves = kernels.to_halves(np.concatenate([u.reshape(-1), v.reshape(-1)]), kernels.derive_key(key, 1))
        return [coefficients.astype("<f4").view(np.uint8), halves.astype("<f2").view(np.uint8)]

    def _unpacked(self, payload: Bytes, count: int, m: int, n: int) -> Iterator[tuple[Array, Array]]:
        payload = np.ascontiguousarray(payload)
        if self.values == "float32":
            coefficients, factors = np.ones(count, np.float32), payload.view("<f4").astype(np.float32)
        else:
            coefficients = payload[: 4 * count].view("<f4").astype(np.float32)
            factors = payload[4 * count :].view("<f2").astype(np.float32)
        left, right = factors[: count * m].reshape(count, m), factors[count * m :].reshape(count, n)
        return ((kernels.weighted_sum((float(c), u)), v) for c, u, v in zip(coefficients, left, right))


def basis_of(matrix: Array, factors: str) -> Array:
    """Orthonormal rows that span the smaller side of a matrix, or as much of it as the matrix reaches.

    float32[k, m] if m <= n, else float32[k, n]; k is at most the smaller of both.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    if factors == "svd":
        u, _, vt = np.linalg.svd(matrix, full_matrices=False)
        return np.ascontiguousarray(vt if tall else u.T)
    wide = matrix.T if tall else matrix
    small = _column_space(wide)
    if small is None:
        return np.ascontiguousarray(np.linalg.eigh(wide @ wide.T)[1].T)
    space, image = small
    return np.ascontiguousarray((space @ np.linalg.eigh(image @ image.T)[1]).T)


def _column_space(wide: Array) -> tuple[Array, Array] | None:
    """Orthonormal columns that hold all of `wide` to rounding, float32[m, SKETCHED], and its coordinates in them.

    None where so few do not. The sketch's triangle tells most matrices of full rank at once; of the others it is looked at
    whether nothing is left.
    """
    m, n = wide.shape
    if m < 2 * SKETCHED:
        return None
    space, triangle = np.linalg.qr(wide @ _signs(n))
    diagonal = np.abs(np.diagonal(triangle))
    if diagonal[-1] > NEGLIGIBLE * diagonal.max():
        return None
    image = space.T @ wide
    negligible = np.linalg.norm(wide - space @ image) <= ROUNDING * np.linalg.norm(wide)
    return (space, image) if negligible else None


@lru_cache(maxsize=16)
def _signs(n: int) -> Array:
    """float32[n, SKETCHED] of -1 and 1, the same each time: for another choice the atoms would be the same to rounding."""
    signs: Array = np.where(np.random.default_rng(n).random((n, SKETCHED)) < 0.5, np.float32(-1), np.float32(1))
    signs.flags.writeable = False
    return signs


def atoms_in(matrix: Array, basis: Array) -> tuple[Array, Array, Array]:
    """float32[k, m], float32[k], float32[k, n]: unit vectors u, magnitudes, unit vectors v of the atoms in a basis."""
    tall = matrix.shape[0] > matrix.shape[1]
    images: Array = basis @ (matrix.T if tall else matrix)
    magnitudes: Array = np.linalg.norm(images, axis=1).astype(np.float32)
    units: NDArray[np.float32] = images / np.where(magnitudes > 0, magnitudes, 1)[:, None]
    return (units, magnitudes, basis) if tall else (basis, magnitudes, units)
