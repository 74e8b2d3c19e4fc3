"""Sketched-SGD: count sketches, summed by allreduce, find the large coordinates; a second allreduce fetches their values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels, options
from ..core import AllReduce, Array, Facts, Group, Layout, Stage, State, Step
from ..errors import CompressionError
from ..sketch import CountSketch, tile_for
from .accumulation import Accumulation, Indices, Selecting, Selection, Split, split_of
from .figures import ring_bytes

SKETCH = 3  # stream of random draws
DIGITS = 4  # floats that the hash of the candidates is sent as, 12 bits each: their sum is exact up to 4,096 ranks


@dataclass(frozen=True)
class SketchedSGD(Accumulation):
    """The k coordinates with the largest accumulated momentum, found through a sketch; the rest waits.

        u = m u + g,  v = v + u                      on every rank
        C = the P k largest estimates from sum S(v)  first allreduce: rows x columns floats
        z = mean of v[C]                             second allreduce: P k floats
        T = the k largest of |z|
        G[T] = z[T],  u[T] = v[T] = 0                on every rank

    G is the mean that the optimizer is given, zero outside T. Tensors of one dimension or none, and those of fewer than
    `exact_below` elements, are not sketched: their v goes with the second allreduce, all of it is applied, and u is kept.

    Payload: float32, summed; ranks choose C and T from the same sums, so no indices are sent. In a ring 8 (r c + P k +
    exact) (W - 1) / W bytes a rank, whatever W. Bias: biased, like top-k; error accumulation (v) makes it converge.
    Memory: 2 d float32 a rank (d without momentum).

    The momentum is this method's. The optimizer must be SGD without momentum of its own, and the learning rate is
    applied by it, at the end. With `momentum=0` all momentum that masking would throw away is given up instead; at high
    compression and with a 4 to 10 times larger rate that is often the better choice.

    Args:
        ratio: floats of both allreduces over d, in (0, 1]; what `columns` and `k` follow from where they are not given.
        k: coordinates updated in a step; by default 0.07 ratio d.
        P: candidates for each of them, at least 1; or 0: one round, the estimates themselves are the values.
        rows: of the sketch, odd.
        columns: of the sketch; by default what `ratio` leaves for it.
        momentum: m, in [0, 1).
        tile: entries hashed together, a power of two; 1 is the ordinary count sketch; 0 chooses by `columns`.
        exact_below: tensors of fewer elements are not sketched.

    Raises:
        ValueError: an option is out of its range.

    >>> SketchedSGD(ratio=0.1).plan(1_000_000)
    Plan(k=7000, candidates=28000, columns=14336, tile=128)

    Source: N. Ivkin, D. Rothchild, E. Ullah, V. Braverman, I. Stoica, R. Arora, "Communication-efficient distributed SGD
    with Sketching", 2019, Algorithm 3; tiles are this project's. The hashes are drawn anew in every step, so that no two
    coordinates meet for ever.
    """

    facts: ClassVar[Facts] = Facts(
        title="Sketched-SGD",
        source="Ivkin et al. 2019, Algorithm 3",
        travels="a count sketch, then the candidates' values; both by allreduce",
        wire="8 (r c + P k + exact) (W - 1) / W",
        bias="like top-k, error feedback",
        memory="2 d; d without momentum",
        exact_for="SGD without momentum of its own",
        use="many ranks, high ratios: bytes are what is asked for, and do not grow with W",
    )

    ratio: float = 0.1
    k: int | None = None
    P: int = 4
    rows: int = 5
    columns: int | None = None
    momentum: float = 0.9
    tile: int = 0
    exact_below: int = 1000

    def __post_init__(self) -> None:
        options.number("ratio", self.ratio, 0, 1, above=True)
        options.whole("P", self.P, 0)
        for name, low in (("rows", 1), ("tile", 0), ("k", 1), ("columns", 1)):
            if getattr(self, name) is not None:
                options.whole(name, getattr(self, name), low)
        super().__post_init__()
        tile = self.tile or 1
        CountSketch(self.rows, -(-(self.columns or 1) // tile) * tile, tile)

    def plan(self, d: int) -> Plan:
        """The sizes for d sketched elements."""
        k = min(d, self.k or max(1, round(0.07 * self.ratio * d)))
        candidates = min(d, max(1, self.P) * k)
        left = (self.ratio * d - (candidates if self.P else 0)) / self.rows
        columns = self.columns or max(1, int(left))
        tile = self.tile or tile_for(columns)
        # What is asked for is rounded up; what is derived keeps to the ratio.
        slots = -(-columns // tile) if self.columns else max(1, columns // tile)
        return Plan(k, candidates, slots * tile, tile)

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        split = split_of(layout, self.exact_below)
        plan = self.plan(split.selectable)
        first, second = self.rows * plan.columns, plan.candidates + split.exact + DIGITS
        if not self.P:
            return (Stage(AllReduce, first + split.exact),)
        return Stage(AllReduce, first), Stage(AllReduce, second)

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return ring_bytes(self.stages(layout, group), group)

    def select(self, v: Array, split: Split, state: State, step: Step) -> Selecting:
        layout, group, _ = state
        plan = self.plan(split.selectable)
        key = kernels.derive_key(group.seed, step.number, SKETCH, 0, layout.bucket)
        sketch = CountSketch(self.rows, plan.columns, plan.tile, key)
        table = sketched(sketch, split, v)
        exact = split.exact_of(v)
        first = yield AllReduce(table.reshape(-1) if self.P else kernels.concatenate([table.reshape(-1), exact]), "sum")
        table, finite = first[: table.size].reshape(table.shape), kernels.all_finite(first)
        estimates = estimated(sketch, split, table)
        paper_bytes = 4 * (table.size + (plan.candidates if self.P else 0) + plan.k) + 8 * exact.size
        if not self.P:
            chosen = kernels.top_k(estimates, plan.k)
            values, exact = (kernels.divide(x, group.size) for x in (estimates[chosen], first[table.size :]))
            return Selection(chosen, values, chosen, exact, paper_bytes, finite)

        candidates = kernels.top_k(estimates, plan.candidates)
        digest = _digits(candidates)
        asked = kernels.concatenate([v[split.places(candidates)], exact, digest])
        second = kernels.divide((yield AllReduce(asked, "sum")), group.size)
        if not np.array_equal(second[-DIGITS:], digest):
            raise CompressionError("the ranks did not choose the same candidates, or one of them failed: their sums differ")
        values, exact = np.split(second[:-DIGITS], [candidates.size])
        chosen = kernels.top_k(values, plan.k)
        return Selection(candidates[chosen], values[chosen], candidates[chosen], exact, paper_bytes, finite)


@dataclass(frozen=True)
class Plan:
    """Sizes of a step: coordinates updated, candidates, and the sketch."""

    k: int
    candidates: int
    columns: int
    tile: int


def sketched(sketch: CountSketch, split: Split, x: Array) -> Array:
    """float32[rows, columns]: the sketch of the selectable elements of a bucket, by their places in it."""
    table = kernels.zeros(sketch.rows * sketch.columns).reshape(sketch.rows, sketch.columns)
    for run in split.runs:
        sketch.add(x[run.where], run.start, table)
    return table


def estimated(sketch: CountSketch, split: Split, table: Array) -> Array:
    """float32[selectable]: what a table of `sketched` holds of each of them."""
    return kernels.concatenate([sketch.estimate(table, run.size, run.start) for run in split.runs])


def _digits(found: Indices) -> Array:
    """float32[DIGITS]: a hash of the candidates."""
    digest = hashlib.sha256(found.astype("<i8").tobytes()).digest()
    return np.frombuffer(digest[: 2 * DIGITS], "<u2").astype(np.float32) % 4096
