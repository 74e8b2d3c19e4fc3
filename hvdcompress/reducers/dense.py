"""No compression: one allreduce. The yardstick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .. import kernels
from ..core import AllReduce, Array, Facts, Group, Layout, Outcome, Reduction, Stage, State, Step
from .figures import ring_bytes
from .states import Memoryless


@dataclass(frozen=True)
class Dense(Memoryless):
    """The mean of the gradients themselves.

    Payload: float32[d], summed by allreduce; 8 d (W - 1) / W bytes a rank in a ring. Bias: none. Memory: none.
    """

    whole_model: ClassVar[bool] = False
    facts: ClassVar[Facts] = Facts(
        title="none",
        source="",
        travels="the gradients as float32; allreduce",
        wire="8 d (W - 1) / W",
        bias="exact",
        memory="none",
        exact_for="every optimizer",
        use="the yardstick",
    )

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        return (Stage(AllReduce, layout.size),)

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return ring_bytes(self.stages(layout, group), group)

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        total = yield AllReduce(grad, "sum")
        return Outcome(kernels.divide(total, state.group.size), state, paper_bytes=8 * grad.size)
