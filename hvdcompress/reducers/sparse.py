"""The baselines of Sketched-SGD that send coordinates without a sketch: local and true top-k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import frame, kernels
from ..codecs import TopK
from ..core import AllGather, AllReduce, Array, Facts, Group, Layout, Stage, State, Step
from .accumulation import Accumulation, Selecting, Selection, Split, split_of
from .channel import Channel
from .figures import ring_bytes


@dataclass(frozen=True)
class _Largest(Accumulation):
    """The options of both: how many coordinates, and what is not selected from."""

    ratio: float = 0.01
    k: int | None = None
    momentum: float = 0.9
    exact_below: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        TopK(self.ratio, self.k)

    @property
    def _codec(self) -> TopK:
        return TopK(self.ratio, self.k)


@dataclass(frozen=True)
class LocalTopK(_Largest):
    """Each rank sends the k largest coordinates of its own v; G is the mean of what is sent.

    Payload: see `TopK`, (W - 1) payloads a rank; and the exact tensors' v by allreduce. G has up to W k coordinates, so
    through a parameter server the way back grows with W. Bias: a contraction with error feedback. Memory: 2 d float32 (d
    without momentum). The optimizer must be SGD without momentum of its own.

    Args:
        ratio: k over the elements that are not exact, in (0, 1].
        k: instead of `ratio`.
        momentum: m, in [0, 1).
        exact_below: tensors of fewer elements are sent exactly.

    Raises:
        ValueError: an option is out of its range.

    Source: a baseline of N. Ivkin et al., "Communication-efficient distributed SGD with Sketching", 2019; masking of the
    momentum as there.
    """

    facts: ClassVar[Facts] = Facts(
        title="local top-k",
        source="baseline of Ivkin et al. 2019",
        travels="places and values of the k largest; allgather",
        wire="(W - 1) k (34 + log2(d / k)) / 8",
        bias="contraction, error feedback",
        memory="2 d; d without momentum",
        exact_for="SGD without momentum of its own",
        use="few ranks",
    )

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        return Stage(AllGather), Stage(AllReduce, split_of(layout, self.exact_below).exact)

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        payload = frame.HEADER.size + self._codec.expected_bytes((split_of(layout, self.exact_below).selectable,))
        return (group.size - 1) * payload + ring_bytes(self.stages(layout, group), group)

    def select(self, v: Array, split: Split, state: State, step: Step) -> Selecting:
        group, channel = state.group, Channel(self._codec, state.layout.bucket, step.number)
        x = split.selectable_of(v)
        sent, _ = channel.pack(x, key=0)
        received = yield AllGather(sent)
        total = kernels.zeros(x.size)
        for sender, buffer in enumerate(received):
            channel.add(buffer, sender, total)
        exact = yield AllReduce(split.exact_of(v), "sum")
        chosen = np.flatnonzero(total)
        paper = sent.size - frame.HEADER.size + 8 * chosen.size + 8 * exact.size
        return Selection(
            chosen,
            kernels.divide(total[chosen], group.size),
            kernels.top_k(x, self._codec.chosen(x.size)),
            kernels.divide(exact, group.size),
            paper,
        )


@dataclass(frozen=True)
class TrueTopK(_Largest):
    """The k largest coordinates of the mean v, which is summed whole: what Sketched-SGD approximates.

    Payload: float32[d] by allreduce: it compresses nothing, and is there to compare with. Bias: a contraction with error
    feedback. Memory: 2 d float32 (d without momentum). The optimizer must be SGD without momentum of its own.

    Args:
        ratio, k, momentum, exact_below: as for `LocalTopK`.

    Raises:
        ValueError: an option is out of its range.

    Source: a baseline of N. Ivkin et al., "Communication-efficient distributed SGD with Sketching", 2019.
    """

    facts: ClassVar[Facts] = Facts(
        title="true top-k",
        source="baseline of Ivkin et al. 2019",
        travels="v as float32; allreduce",
        wire="8 d (W - 1) / W: nothing is saved",
        bias="contraction, error feedback",
        memory="2 d; d without momentum",
        exact_for="SGD without momentum of its own",
        use="comparison: what a perfect sketch would do",
    )

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        return (Stage(AllReduce, layout.size),)

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return ring_bytes(self.stages(layout, group), group)

    def select(self, v: Array, split: Split, state: State, step: Step) -> Selecting:
        mean = kernels.divide((yield AllReduce(v, "sum")), state.group.size)
        x, exact = split.selectable_of(mean), split.exact_of(mean)
        chosen = kernels.top_k(x, self._codec.chosen(x.size))
        return Selection(chosen, x[chosen], chosen, exact, 4 * (x.size + chosen.size) + 8 * exact.size, kernels.all_finite(mean))
