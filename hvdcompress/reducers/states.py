"""What reducers share in their memories: those that have none, and how one group's goes on in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from .. import kernels
from ..core import Array, Group, Layout, State


class Memoryless:
    """A reducer that keeps nothing from step to step."""

    def init(self, layout: Layout, group: Group) -> State:
        return State(layout, group, {})

    def residual(self, state: State) -> float:
        return 0.0

    def redistribute(self, states: Iterable[State], layout: Layout, group: Group) -> State:
        return self.init(layout, group)


class Means:
    """Means of vectors by name, over those that are added one after the other: the same on all ranks, in their order."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._counts: dict[str, int] = {}

    def add(self, vectors: Mapping[str, NDArray[Any]]) -> None:
        for name, vector in vectors.items():
            terms = [(1.0, self._sums[name])] if name in self._sums else []
            self._sums[name] = kernels.weighted_sum(*terms, (1.0, vector))
            self._counts[name] = self._counts.get(name, 0) + 1

    def get(self, name: str, default: Array) -> Array:
        """The mean of what was added; the default if nothing was."""
        return kernels.divide(self._sums[name], self._counts[name]) if name in self._sums else default
