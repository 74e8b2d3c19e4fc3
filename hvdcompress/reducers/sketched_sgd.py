"""Sketched-SGD: count sketches, summed by allreduce, find the large coordinates; a second allreduce fetches their values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..core import AllReduce, Array, Group, Layout, Outcome, Part, Reduction, Stage, State, Step
from ..errors import CompressionError
from ..sketch import CountSketch, tile_for
from .figures import relative

SKETCH = 3  # stream of random draws
DIGITS = 4  # floats that the hash of the candidates is sent as, 12 bits each: their sum is exact up to 4,096 ranks

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class SketchedSGD:
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

    whole_model: ClassVar[bool] = True

    ratio: float = 0.1
    k: int | None = None
    P: int = 4
    rows: int = 5
    columns: int | None = None
    momentum: float = 0.9
    tile: int = 0
    exact_below: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], not {self.ratio}")
        if self.k is not None and self.k < 1:
            raise ValueError(f"k must be at least 1, not {self.k}")
        if self.P < 0:
            raise ValueError(f"P must be at least 1, or 0 for one round, not {self.P}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
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

    def init(self, layout: Layout, group: Group) -> State:
        arrays = {"v": kernels.zeros(layout.size)}
        if self.momentum:
            arrays["u"] = kernels.zeros(layout.size)
        return State(layout, group, arrays)

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        split = self._split(layout)
        plan = self.plan(split.sketched)
        first, second = self.rows * plan.columns, plan.candidates + split.exact + DIGITS
        if not self.P:
            return (Stage(AllReduce, first + split.exact),)
        return Stage(AllReduce, first), Stage(AllReduce, second)

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return 8 * sum(stage.length for stage in self.stages(layout, group)) * (group.size - 1) / group.size

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        layout, group, arrays = state
        split = self._split(layout)
        plan = self.plan(split.sketched)
        sketch = CountSketch(
            self.rows, plan.columns, plan.tile, kernels.derive_key(group.seed, step.number, SKETCH, 0, layout.bucket)
        )
        u = kernels.weighted_sum((self.momentum, arrays["u"]), (1.0, grad)) if self.momentum else grad
        v = kernels.weighted_sum((1.0, arrays["v"]), (1.0, u))

        table = kernels.zeros(self.rows * plan.columns).reshape(self.rows, plan.columns)
        for run in split.runs:
            sketch.add(v[run.where], run.start, table)
        exact = kernels.concatenate([v[run.where] for run in split.exact_runs])
        first = yield AllReduce(table.reshape(-1) if self.P else kernels.concatenate([table.reshape(-1), exact]), "sum")
        table = first[: table.size].reshape(table.shape)
        estimates = kernels.concatenate([sketch.estimate(table, run.size, run.start) for run in split.runs])
        found = kernels.top_k(estimates, plan.candidates if self.P else plan.k)
        places = split.places(found)

        if self.P:
            digest = _digits(found)
            second = kernels.divide((yield AllReduce(kernels.concatenate([v[places], exact, digest]), "sum")), group.size)
            if not np.array_equal(second[len(places) + exact.size :], digest):
                raise CompressionError("the ranks did not choose the same candidates, or one of them failed: their sums differ")
            values, exact = second[: len(places)], second[len(places) : len(places) + exact.size]
            chosen = kernels.top_k(values, plan.k)
            places, values = places[chosen], values[chosen]
        else:
            values, exact = kernels.divide(estimates[found], group.size), kernels.divide(first[table.size :], group.size)

        mean = kernels.zeros(layout.size)
        mean[places] = values
        v[places] = 0
        memory = {"v": v}
        if self.momentum:
            memory["u"] = u
            u[places] = 0
        start = 0
        for run in split.exact_runs:
            mean[run.where] = exact[start : start + run.size]
            v[run.where] = 0
            start += run.size
        if not kernels.all_finite(first):
            mean = mean * np.float32("nan")  # all ranks see it, and none commits
        paper = 4 * (self.rows * plan.columns + (plan.candidates if self.P else 0) + plan.k) + 8 * exact.size
        metrics = {"waiting": relative(kernels.sum_of_squares(v), grad)}
        return Outcome(mean, State(layout, group, memory), paper, metrics)

    def _split(self, layout: Layout) -> Split:
        runs: list[Part] = []
        exact_runs: list[Part] = []
        for shape, where in zip(layout.shapes, layout.slices.values()):
            exact = len(shape) < 2 or math.prod(shape) < self.exact_below
            kind = exact_runs if exact else runs
            if kind and kind[-1].stop == where.start:
                kind[-1] = Part(kind[-1].start, where.stop)
            else:
                kind.append(Part(where.start, where.stop))
        return Split(tuple(runs), tuple(exact_runs))


@dataclass(frozen=True)
class Plan:
    """Sizes of a step: coordinates updated, candidates, and the sketch."""

    k: int
    candidates: int
    columns: int
    tile: int


@dataclass(frozen=True)
class Split:
    """Runs of a bucket's elements that are sketched, and those that are sent exactly."""

    runs: tuple[Part, ...]
    exact_runs: tuple[Part, ...]

    @property
    def sketched(self) -> int:
        return sum(run.size for run in self.runs)

    @property
    def exact(self) -> int:
        return sum(run.size for run in self.exact_runs)

    def places(self, found: Indices) -> Indices:
        """Numbers among the sketched elements to places in the bucket."""
        starts = np.cumsum([0, *(run.size for run in self.runs)])
        shifts = np.array([run.start for run in self.runs], np.int64) - starts[:-1]
        return found + shifts[np.searchsorted(starts, found, side="right") - 1] if len(shifts) else found


def _digits(found: Indices) -> Array:
    """float32[DIGITS]: a hash of the candidates."""
    digest = hashlib.sha256(found.astype("<i8").tobytes()).digest()
    return np.frombuffer(digest[: 2 * DIGITS], "<u2").astype(np.float32) % 4096
