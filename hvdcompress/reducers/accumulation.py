"""What Sketched-SGD and its baselines share: momentum and gradients accumulate on each rank until they are applied."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import kernels, options
from ..core import Array, Collective, Group, Layout, Outcome, Part, Reduction, State, Step
from .figures import abandoned, relative
from .states import Means

Indices = NDArray[np.int64]


class Selection(NamedTuple):
    """What a method has chosen to apply.

    Attributes:
        chosen: int64[...], numbers among the elements that are not exact, whose mean is not zero.
        values: float32[...], their mean.
        taken: int64[...], those that this rank's v has given away.
        exact: float32[split.exact], the mean of the elements that are sent exactly.
        paper_bytes: as an `Outcome` has them.
        finite: False if a sum, the same on every rank, is not.
    """

    chosen: Indices
    values: Array
    taken: Indices
    exact: Array
    paper_bytes: int
    finite: bool = True


Selecting = Generator[Collective, Any, Selection]


class Accumulation:
    """The reducer of a method that applies some coordinates a step, whole, and lets the others wait.

        u = m u + g,  v = v + u        on every rank
        T, z = select(v)               the method: coordinates and their mean
        G[T] = z,  u[T] = v[T] = 0     masked on the rank where its v went into the mean

    G is the mean that the optimizer is given, zero outside T. Tensors of one dimension or none, and those of fewer than
    `exact_below` elements, are sent exactly: all of their v is applied, and u is kept.

    A method is a frozen dataclass with the options `momentum` (m) and `exact_below`.
    """

    whole_model: ClassVar[bool] = True

    momentum: float
    exact_below: int

    def select(self, v: Array, split: Split, state: State, step: Step) -> Selecting:
        """Asks for the method's collectives. v is float32[layout.size]."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        options.number("momentum", self.momentum, 0, 1, below=True)
        options.whole("exact_below", self.exact_below, 0)

    def init(self, layout: Layout, group: Group) -> State:
        arrays = {"v": kernels.zeros(layout.size)}
        if self.momentum:
            arrays["u"] = kernels.zeros(layout.size)
        return State(layout, group, arrays)

    def residual(self, state: State) -> float:
        return kernels.sum_of_squares(state.arrays["v"])

    def redistribute(self, states: Iterable[State], layout: Layout, group: Group) -> State:
        new, means = self.init(layout, group), Means()
        for state in states:
            means.add(state.arrays)
        return new._replace(arrays={name: means.get(name, array) for name, array in new.arrays.items()})

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        arrays, split = state.arrays, split_of(state.layout, self.exact_below)
        u = kernels.weighted_sum((self.momentum, arrays["u"]), (1.0, grad)) if self.momentum else grad
        v = kernels.weighted_sum((1.0, arrays["v"]), (1.0, u))
        selection = yield from self.select(v, split, state, step)
        mean = split.joined(selection.chosen, selection.values, selection.exact)
        taken, memory = split.places(selection.taken), {"v": v}
        v[taken] = 0
        if self.momentum:
            memory["u"] = u
            u[taken] = 0
        for run in split.exact_runs:
            v[run.where] = 0
        if not selection.finite:
            mean = abandoned(mean)
        metrics = {"waiting": relative(kernels.sum_of_squares(v), step.squares)}
        return Outcome(mean, state._replace(arrays=memory), selection.paper_bytes, metrics)


@dataclass(frozen=True)
class Split:
    """Runs of a bucket's elements from which a method selects, and those that are sent exactly."""

    runs: tuple[Part, ...]
    exact_runs: tuple[Part, ...]

    @property
    def selectable(self) -> int:
        return sum(run.size for run in self.runs)

    @property
    def exact(self) -> int:
        return sum(run.size for run in self.exact_runs)

    def selectable_of(self, x: Array) -> Array:
        """float32[selectable]: the elements of x from which a method selects."""
        return kernels.concatenate([x[run.where] for run in self.runs])

    def exact_of(self, x: Array) -> Array:
        """float32[exact]: the elements of x that are sent exactly."""
        return kernels.concatenate([x[run.where] for run in self.exact_runs])

    def joined(self, chosen: Indices, values: Array, exact: Array) -> Array:
        """float32[...]: a bucket of these elements, by numbers among the selectable ones, and of the exact ones."""
        bucket, start = kernels.zeros(self.selectable + self.exact), 0
        bucket[self.places(chosen)] = values
        for run in self.exact_runs:
            bucket[run.where] = exact[start : start + run.size]
            start += run.size
        return bucket

    def places(self, found: Indices) -> Indices:
        """Numbers among the selectable elements to places in the bucket."""
        starts = np.cumsum([0, *(run.size for run in self.runs)])
        shifts = np.array([run.start for run in self.runs], np.int64) - starts[:-1]
        return found + shifts[np.searchsorted(starts, found, side="right") - 1] if len(shifts) else found


def split_of(layout: Layout, exact_below: int) -> Split:
    """The split of a bucket; neighbouring tensors of a kind make one run."""
    runs: list[Part] = []
    exact_runs: list[Part] = []
    for shape, where in zip(layout.shapes, layout.slices.values()):
        exact = len(shape) < 2 or math.prod(shape) < exact_below
        kind = exact_runs if exact else runs
        if kind and kind[-1].stop == where.start:
            kind[-1] = Part(kind[-1].start, where.stop)
        else:
            kind.append(Part(where.start, where.stop))
    return Split(tuple(runs), tuple(exact_runs))
