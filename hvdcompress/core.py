"""The vocabulary of the project: what a method may ask for, what it is told, and what it must offer.

A method of distributed averaging with memory is a `Reducer`. Its `reduce` is a generator that *yields* the collective
it needs and is sent the answer; it never calls MPI, Horovod or a framework. A driver (`hvdcompress.drivers`, and the
adapters `hvdcompress.torch`, ...) executes the collectives. So one text of an algorithm runs over Horovod, over mpi4py
and, for any number of ranks, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, Union, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class AllReduce(NamedTuple):
    """Asks for the element-wise sum or maximum over ranks. Reply: an array like `array`, bitwise equal on all ranks."""

    array: NDArray[Any]  # float32 or int32
    op: str  # "sum" or "max"


class AllGather(NamedTuple):
    """Asks for every rank's payload. Reply: a list of uint8 arrays in rank order."""

    payload: Bytes  # uint8[n], n >= 1 may differ by rank


class AllToAll(NamedTuple):
    """Sends payload i to rank i. Reply: a list of uint8 arrays, one from each rank, in rank order."""

    payloads: list[Bytes]  # one for each rank, none of them empty


Collective = Union[AllReduce, AllGather, AllToAll]


class Stage(NamedTuple):
    """One collective of a reducer, as known before any gradient: its kind, and for an allreduce the rest."""

    kind: type[AllReduce] | type[AllGather] | type[AllToAll]
    length: int = 0
    dtype: str = "float32"
    op: str = "sum"


@dataclass(frozen=True)
class Layout:
    """The tensors of one bucket, in order, over one flat float32 vector.

    Args:
        names: of the tensors, unique in the model.
        shapes: of the same tensors.
        bucket: the bucket's number; it keeps the random draws of two buckets apart.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucket: int = 0

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Iterable[int]]], bucket: int = 0) -> Layout:
        """Makes a layout of (name, shape) pairs."""
        pairs = [(name, tuple(int(n) for n in shape)) for name, shape in tensors]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs), bucket)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each tensor lies in the flat vector."""
        where, start = {}, 0
        for name, shape in zip(self.names, self.shapes):
            where[name] = slice(start, start + math.prod(shape))
            start = where[name].stop
        return where

    @cached_property
    def size(self) -> int:
        """Number of elements of the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes)


class Part(NamedTuple):
    """A run of a bucket's elements."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def where(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Group:
    """Who takes part: this process's rank, how many there are, and the seed that all of them share."""

    rank: int
    size: int
    seed: int = 0


class Step(NamedTuple):
    """What a reducer is told of the step.

    `number` counts the steps that were committed before this one: a step that is abandoned leaves no trace, so the
    next one has its number and its random draws. `squares` is ||gradient||^2 of the bucket on this rank, and `lr` the
    bucket's learning rate where the caller gave one.
    """

    number: int
    squares: float
    lr: float | None = None


class State(NamedTuple):
    """A reducer's memory of one bucket on one rank. Never written to: each step makes a new one."""

    layout: Layout
    group: Group
    arrays: Mapping[str, NDArray[Any]]


class Outcome(NamedTuple):
    """What a reduction ends with.

    `mean` is float32[layout.size], bitwise equal on all ranks. `paper_bytes` is what the same step would send per
    worker, up and down, through the parameter server that the papers count with. `metrics` are further figures by name.
    """

    mean: Array
    state: State
    paper_bytes: int
    metrics: Mapping[str, float] = {}


Reduction = Generator[Collective, Any, Outcome]


class Facts(NamedTuple):
    """What the table of methods says of one of them, in Markdown's words.

    Attributes:
        title, source: of the method.
        travels: what is exchanged, and how.
        wire: bytes that a rank sends in a step, as a function of d (elements), W (ranks) and the options.
        bias: unbiased, or a contraction, and what becomes of the error.
        memory: floats that a rank keeps.
        exact_for: the optimizers with which it is the method of its source.
        use: when to take it.
    """

    title: str
    source: str
    travels: str
    wire: str
    bias: str
    memory: str
    exact_for: str
    use: str


@runtime_checkable
class Reducer(Protocol):
    """A method: a frozen dataclass of its options, with these members."""

    facts: ClassVar[Facts]
    """For the table of methods."""

    whole_model: ClassVar[bool]
    """True if one bucket has to hold all tensors, small ones too; else they may be cut into buckets."""

    def init(self, layout: Layout, group: Group) -> State:
        """The memory before the first step."""

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        """The collectives that `reduce` will ask for: the same on every rank, in every step."""

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        """Bytes that a rank sends in a step, the mean over ranks, as the method's formula has it.

        What depends on the data goes by `metrics`, as an `Outcome` has them, or by what is usual.
        """

    def residual(self, state: State) -> float:
        """Squared l2 norm of what this rank keeps of gradients that have not been applied yet; 0 where nothing is."""

    def redistribute(self, states: Iterable[State], layout: Layout, group: Group) -> State:
        """The memory with which a rank of `group` goes on where the ranks of another group stopped.

        What the ranks together have not applied yet stays what it is, so that no part of a gradient is lost: what each rank
        has for itself becomes the mean over ranks, what one rank has for all is put together. `states` are those of all ranks
        of the other group, or of those that are left, in rank order; they are gone through once.
        """

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        """Asks for the collectives of one step and returns the mean over ranks with the memory after the step.

        `grad` is this rank's gradient, float32[layout.size], contiguous and finite; it is neither written to nor kept.
        """
