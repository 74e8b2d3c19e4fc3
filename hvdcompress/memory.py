"""What a rank keeps from step to step, in the form in which it is saved, and how it goes on with another number of ranks.

A memory is a mapping, of numbers, strings and arrays only:

    step     int, steps that were committed
    rank     int, whose it is
    run      str, names the start of a training that it is of: memories of two are not mixed, though their steps be the same
    facts    what the ranks of the training agreed on: str by str
    layouts  of each bucket, the names and shapes of its tensors: [[name, [length, ...]], ...]
    arrays   the method's own, by "<bucket>.<name>"
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .core import Group, Layout, Reducer, State
from .errors import CompressionError

RANKS = "number of ranks"  # the fact that may change while a training goes on


def of(states: Sequence[State], step: int, group: Group, facts: Mapping[str, str], run: str) -> dict[str, Any]:
    """The memory that a rank's states are."""
    return {
        "step": step,
        "rank": group.rank,
        "run": run,
        "facts": dict(facts),
        "layouts": [[[name, list(shape)] for name, shape in zip(state.layout.names, state.layout.shapes)] for state in states],
        "arrays": {f"{bucket}.{name}": a for bucket, state in enumerate(states) for name, a in state.arrays.items()},
    }


def check(memory: Mapping[str, Any]) -> None:
    """Raises a CompressionError if this is none."""
    kinds = {"step": int, "rank": int, "run": str, "facts": Mapping, "layouts": Sequence, "arrays": Mapping}
    if not all(isinstance(memory.get(name), kind) for name, kind in kinds.items()):
        raise CompressionError(f"this is no memory of a compressor: it has {sorted(memory)}")
    ranks = str(memory["facts"].get(RANKS))
    if not (ranks.isdecimal() and 0 <= memory["rank"] < int(ranks) and memory["step"] >= 0):
        raise CompressionError(f"this memory is of step {memory['step']} and rank {memory['rank']} of {ranks}, which cannot be")


def state_of(memory: Mapping[str, Any], method: Reducer, layout: Layout, group: Group) -> State:
    """A bucket's state.

    Raises:
        CompressionError: it is not all there, or not finite.
    """
    arrays = {}
    for name, array in method.init(layout, group).arrays.items():
        key = f"{layout.bucket}.{name}"
        saved = memory["arrays"].get(key)
        if saved is None or saved.shape != array.shape or saved.dtype != array.dtype:
            raise CompressionError(f"the saved memory of rank {group.rank} has no {key} of {array.dtype}{list(array.shape)}")
        if not np.isfinite(saved).all() and name != "lr":
            raise CompressionError(f"the saved memory of rank {group.rank} is not finite in {key}")
        arrays[name] = saved.copy()
    return State(layout, group, arrays)


def redistributed(memories: Sequence[Mapping[str, Any]], method: Reducer, rank: int, size: int) -> dict[str, Any]:
    """The memory with which a rank of `size` goes on where others of the same training stopped.

    What the ranks together have not applied yet stays what it is, as the method's `redistribute` says.

    Args:
        memories: of all ranks that there were, or of those that are left, in rank order. Their arrays are asked for bucket by
            bucket, and for each bucket rank by rank.

    Raises:
        CompressionError: they are not of one training and step, or incomplete.
    """
    for one in memories:
        check(one)
    first = memories[0]
    if first["facts"].get("method") != repr(method):
        raise CompressionError(
            "the saved memory is of another training; of what was saved and what is here, method: "
            f"{first['facts'].get('method')} and {method}"
        )
    for one in memories:
        if one["facts"] != first["facts"]:
            raise CompressionError(f"the saved memories are of several trainings: {difference(first['facts'], one['facts'])}")
        if one["step"] != first["step"]:
            raise CompressionError(
                f"the saved memories of ranks {first['rank']} and {one['rank']} are of steps {first['step']} and {one['step']}: "
                "give those of one step"
            )
        if one["run"] != first["run"]:
            raise CompressionError(
                f"the saved memories of ranks {first['rank']} and {one['rank']} are of two runs of the training, though of the "
                "same step: give those that were saved together"
            )
    before, seed = int(first["facts"][RANKS]), int(first["facts"]["seed"])
    group, states = Group(rank, size, seed), []
    for bucket, tensors in enumerate(first["layouts"]):
        layout = Layout.of(((name, shape) for name, shape in tensors), bucket)
        owed = _Owed()
        old = owed.summed(method, (state_of(one, method, layout, Group(one["rank"], before, seed)) for one in memories))
        states.append(method.redistribute(old, layout, group))
        if owed.square and not states[-1].arrays:
            warnings.warn(
                f"with {size} ranks bucket {bucket} is averaged dense and has no memory: what was kept back of its gradients, of "
                f"l2 norm {math.sqrt(owed.square):g}, is dropped; fix exchange= to keep it",
                RuntimeWarning,
                stacklevel=2,
            )
    return of(states, first["step"], group, {**first["facts"], RANKS: str(size)}, first["run"])


class Arrays(Mapping[str, NDArray[Any]]):
    """Arrays that are fetched when they are asked for: those of all ranks together may be more than there is room for."""

    def __init__(self, names: Iterable[str], fetch: Callable[[str], NDArray[Any]]):
        self._names, self._fetch = list(names), fetch

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._fetch(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Owed:
    """Squared l2 norm of what is kept back in the states that have gone by."""

    square = 0.0

    def summed(self, method: Reducer, states: Iterator[State]) -> Iterator[State]:
        for state in states:
            self.square += method.residual(state)
            yield state


def difference(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """In what the facts of two ranks, or trainings, differ."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    shown = "; ".join(f"{name}: {first.get(name, 'nothing')} and {other.get(name, 'nothing')}" for name in names[:3])
    return (shown or "the order of their tensors") + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
