"""Count sketches: small linear images of a vector, from which its large entries can be estimated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import kernels, options
from .core import Array

LARGEST_TILE = 256  # entries that are hashed together: the fastest, and it costs no accuracy
LEAST_SLOTS = 64  # tiles that a row has room for


@dataclass(frozen=True)
class CountSketch:
    """r rows of c cells; entry i is added to one cell of each row with a random sign.

        T[j, b] = sum over {i: h_j(i) = b} of s_j(i) x_i,    estimate of x_i = median over j of s_j(i) T[j, h_j(i)]

    Linear: S(ax + by) = a S(x) + b S(y), so sketches of several ranks can be summed. A row's estimate has mean x_i and a
    variance of at most ||x||^2 / c. With `tile` > 1 whole tiles of consecutive entries are hashed: cell and sign are drawn
    for the tile, which is then rotated inside its slot. Mean and variance are the same; the errors of a tile's entries
    are not independent.

    Args:
        rows: odd, so that the median is one of the rows' estimates.
        columns: a multiple of `tile`.
        tile: a power of two; 1 is the ordinary count sketch.
        key: of the hashes; the same on all ranks.

    Raises:
        ValueError: an option is out of its range.

    >>> import numpy as np
    >>> sketch = CountSketch(rows=3, columns=64, tile=1, key=5)
    >>> x = np.zeros(1000, np.float32); x[7] = 2.5
    >>> sketch.estimate(sketch.of(x), 1000)[7]
    2.5

    Source: M. Charikar, K. Chen, M. Farach-Colton, "Finding Frequent Items in Data Streams", 2002.
    """

    rows: int
    columns: int
    tile: int
    key: int = 0

    def __post_init__(self) -> None:
        options.whole("rows", self.rows, 1)
        if self.rows % 2 == 0:
            raise ValueError(
                f"rows must be odd, not {self.rows}: the median of an even number of estimates is biased or between two"
            )
        options.whole("tile", self.tile, 1)
        options.whole("columns", self.columns, 1)
        if self.tile & (self.tile - 1):
            raise ValueError(f"tile must be a power of two, not {self.tile}")
        if self.columns % self.tile:
            raise ValueError(f"columns must be a positive multiple of tile ({self.tile}), not {self.columns}")
        if self.columns // self.tile >> 32:  # a slot is drawn with 32 bits
            raise ValueError(f"columns must be fewer than 2^32 times tile ({self.tile}), not {self.columns}")

    @property
    def _keys(self) -> list[int]:
        return [kernels.derive_key(self.key, row) for row in range(self.rows)]

    def of(self, x: Array, start: int = 0) -> Array:
        """float32[rows, columns]: the sketch of a vector."""
        return self.add(x, start, kernels.zeros(self.rows * self.columns).reshape(self.rows, self.columns))

    def add(self, x: Array, start: int, table: Array) -> Array:
        """Adds to a sketch, in place, a part of the vector that lies at `start`."""
        kernels.sketch_accumulate(x, start, table, self.tile, self._keys)
        return table

    def estimate(self, table: Array, n: int, start: int = 0) -> Array:
        """float32[n]: the estimates of entries start ... start + n."""
        return kernels.sketch_estimate(n, start, table, self.tile, self._keys)


def squared_norm(table: Array) -> float:
    """The estimate of ||x||^2 from its sketch: the median over rows of the rows' squared norms."""
    return sorted(kernels.sum_of_squares(row) for row in table)[len(table) // 2]


def tile_for(columns: int) -> int:
    """The largest power of two, up to `LARGEST_TILE`, with at least `LEAST_SLOTS` slots in a row; 1 for a small sketch."""
    tile = LARGEST_TILE
    while tile > 1 and columns // tile < LEAST_SLOTS:
        tile //= 2
    return tile


def heavymix(sketch: CountSketch, table: Array, n: int, k: int, draws: np.random.Generator) -> NDArray[np.int64]:
    """The coordinates that Algorithm 2's server asks for: int64[min(k, n)], ascending.

    Those whose squared estimate is at least 1/k of the estimated ||x||^2, at most k of them, the largest first (the
    norm's estimate may be low, and let more pass); then coordinates drawn uniformly from the rest, until there are k.

    Source: N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica, R. Arora, "Communication-efficient distributed SGD
    with Sketching", 2019, Algorithm 1 (HEAVYMIX), with the square that its threshold lacks in print.
    """
    k = min(k, n)
    estimates = sketch.estimate(table, n)
    heavy = kernels.top_k(estimates, k)
    heavy = heavy[np.square(estimates[heavy], dtype=np.float64) >= squared_norm(table) / max(1, k)]
    rest = np.setdiff1d(np.arange(n), heavy, assume_unique=True)
    return np.sort(np.concatenate([heavy, draws.choice(rest, k - heavy.size, replace=False)]))
