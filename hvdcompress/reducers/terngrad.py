"""TernGrad: ternary gradients with one scale a tensor, of the rank's own or shared by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels, options
from ..codecs import PerTensor, Ternary
from ..core import AllReduce, Array, Facts, Group, Layout, Outcome, Reduction, Stage, State, Step
from ..errors import CompressionError
from .figures import abandoned, relative, ring_bytes
from .states import Memoryless
from .two_pass import UPLINK, Settings, TwoPass

SOURCE = "Wen et al. 2017"


@dataclass(frozen=True)
class TernGrad(TwoPass):
    """Every tensor of a rank in three levels of its own maximum: G = mean Q(g_i), by allgather.

    Payload: a scale a tensor, mask and signs (`Ternary` with a block as large as the tensor), 4 bytes a tensor. Bias:
    none; with `clip` biased, since what is cut off is lost. Memory: none. Unclipped it is ATOMO with entries as atoms and
    budget="max".

    Args:
        clip: first limits each tensor to so many of its standard deviations, taken about zero. The paper uses 2.5. None: no
            clipping.

    Raises:
        ValueError: an option is out of its range.

    Source: W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary Gradients to Reduce Communication in
    Distributed Deep Learning", 2017, section 3.
    """

    facts: ClassVar[Facts] = Facts(
        title="TernGrad",
        source=SOURCE,
        travels="a scale a tensor, mask, signs; allgather",
        wire="(W - 1) (1 + p) d / 8",
        bias="unbiased; biased with clip",
        memory="none",
        exact_for="every optimizer: the mean is unbiased",
        use="comparison; few ranks",
    )

    clip: float | None = None

    def __post_init__(self) -> None:
        _check(self.clip)
        super().__post_init__()

    def settings(self, layout: Layout) -> Settings:
        return Settings(PerTensor(tuple((Ternary(max(1, np.prod(s, dtype=int).item())), s) for s in layout.shapes)))

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        if self._exchange(state.layout, state.group) != "dense":
            grad = _clipped(grad, state.layout, self.clip)
        return (yield from super().reduce(grad, state, step))


@dataclass(frozen=True)
class TernGradShared(Memoryless):
    """TernGrad with one scale for all ranks, so that codes can be summed by allreduce.

    First the scales, by a max-allreduce of a float32 a tensor; then each rank's signs in {-1, 0, 1}, as digits of
    ceil(log2(2 W + 1)) bits in int32 words that are summed: no sum of W digits reaches the next digit.

    Payload: 4 bytes a tensor; then 4 ceil(d / floor(32 / bits)) bytes and 4 more, a count of the ranks; each in a ring
    2 (W - 1) / W times. Bias: none; with `clip` biased. Memory: none.

    Args:
        clip: as for `TernGrad`.

    Raises:
        ValueError: an option is out of its range.

    Source: as of `TernGrad`, "scaler sharing".
    """

    whole_model: ClassVar[bool] = False
    facts: ClassVar[Facts] = Facts(
        title="TernGrad, shared scales",
        source=f"{SOURCE}, scaler sharing",
        travels="scales by max-allreduce, then integers by allreduce",
        wire="about 2 (W - 1) / W d ceil(log2(2 W + 1)) / 8",
        bias="unbiased; biased with clip",
        memory="none",
        exact_for="every optimizer: the mean is unbiased",
        use="many ranks, where only allreduce is fast",
    )

    clip: float | None = None

    def __post_init__(self) -> None:
        _check(self.clip)

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        words = kernels.digit_words(layout.size, group.size) + 1
        return Stage(AllReduce, len(layout.shapes), op="max"), Stage(AllReduce, words, "int32")

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return ring_bytes(self.stages(layout, group), group)

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        layout, group, _ = state
        x, slices = _clipped(grad, layout, self.clip), list(layout.slices.values())
        own = np.array([kernels.largest(x[where]) for where in slices], np.float32)
        scales = yield AllReduce(own, "max")
        key = kernels.derive_key(group.seed, step.number, UPLINK, group.rank, layout.bucket)
        signs = [
            kernels.ternary_signs(x[where], float(scale), kernels.derive_key(key, number))
            for number, (where, scale) in enumerate(zip(slices, scales))
        ]
        words = kernels.pack_digits(np.concatenate([np.zeros(0, np.int8), *signs]), group.size)
        total = yield AllReduce(np.append(words, np.int32(1)), "sum")
        if total[-1] != group.size:
            raise CompressionError(f"{total[-1]} of {group.size} ranks have sent their codes: one of them failed")
        digits = kernels.unpack_digits(total[:-1], layout.size, group.size)
        sums = [kernels.weighted_sum((float(scale), digits[where])) for where, scale in zip(slices, scales)]
        mean = kernels.divide(kernels.concatenate(sums), group.size)
        noise = sum(
            float(np.abs(x[where]).sum(dtype=np.float64)) * float(scale) - kernels.sum_of_squares(x[where])
            for where, scale in zip(slices, scales)
        )
        metrics = {
            "uplink_density": float(np.count_nonzero(np.concatenate([[0], *signs])) / max(1, layout.size)),
            "uplink_noise": relative(max(0.0, noise), step.squares),
        }
        if not kernels.all_finite(scales):
            mean = abandoned(mean)
        return Outcome(mean, state, paper_bytes=4 * (2 * own.size + words.size) + 4 * layout.size, metrics=metrics)


def _check(clip: object) -> None:
    if clip is not None:
        options.number("clip", clip, 0, above=True)


def _clipped(x: Array, layout: Layout, clip: float | None) -> Array:
    if clip is None:
        return x
    return kernels.concatenate([kernels.clipped(x[where], clip) for where in layout.slices.values()])
