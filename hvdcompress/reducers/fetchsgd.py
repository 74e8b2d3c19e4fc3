"""FetchSGD: momentum and error live in the sketch, so the ranks keep nothing of the size of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from ..core import AllReduce, Array, Facts, Group, Layout, Outcome, Reduction, Stage, State, Step
from ..sketch import CountSketch
from .accumulation import split_of
from .figures import abandoned
from .sketched_sgd import SKETCH, SketchedSGD, estimated, sketched


@dataclass(frozen=True)
class FetchSGD:
    """The k largest coordinates of an accumulated sketch, by their estimates, in one round.

        Su = m Su + mean S(g),  Se = Se + Su           S: count sketch, the same in every step
        T, z = the k largest estimates from Se
        G[T] = z;  cells that S(z on T) touches: Su = Se = 0

    Zeroing the cells also takes what collides with them; subtracting S(z) instead, as the paper writes it, diverges.
    Exact tensors (`exact_below`) have the momentum u = m u + mean g, and G = u.

    Payload: float32[rows, columns] and the exact tensors by one allreduce. Bias: like top-k, with the estimates' errors.
    Memory: 2 rows columns float32 and the exact tensors' u. The optimizer must be SGD without momentum of its own.

    Args:
        ratio: floats sent over d, in (0, 1]; k: coordinates updated in a step, by default 0.07 ratio d.
        rows, columns, tile, exact_below: as for `SketchedSGD`.
        momentum: m, in [0, 1).

    Raises:
        ValueError: an option is out of its range.

    Source: D. Rothchild et al., "FetchSGD: Communication-Efficient Federated Learning with Sketching", 2020; the zeroing
    as in its published code.
    """

    whole_model: ClassVar[bool] = True
    facts: ClassVar[Facts] = Facts(
        title="FetchSGD",
        source="Rothchild et al. 2020, and its published code",
        travels="a count sketch; allreduce",
        wire="8 (r c + exact) (W - 1) / W",
        bias="like top-k, with estimates for values",
        memory="2 r c",
        exact_for="SGD without momentum of its own",
        use="where memory is short, or ranks come and go",
    )

    ratio: float = 0.1
    k: int | None = None
    rows: int = 5
    columns: int | None = None
    momentum: float = 0.9
    tile: int = 0
    exact_below: int = 1000

    def __post_init__(self) -> None:
        self._one_round()  # checks the options

    def _one_round(self) -> SketchedSGD:
        return SketchedSGD(self.ratio, self.k, 0, self.rows, self.columns, self.momentum, self.tile, self.exact_below)

    def init(self, layout: Layout, group: Group) -> State:
        exact = split_of(layout, self.exact_below).exact
        cells = self.stages(layout, group)[0].length - exact
        return State(layout, group, {"Su": kernels.zeros(cells), "Se": kernels.zeros(cells), "u": kernels.zeros(exact)})

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        return self._one_round().stages(layout, group)

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return self._one_round().wire_bytes(layout, group)

    def residual(self, state: State) -> float:
        return kernels.sum_of_squares(state.arrays["Se"].reshape(-1)) / self.rows  # by the sketch's own estimate

    def redistribute(self, states: Iterable[State], layout: Layout, group: Group) -> State:
        first = next(iter(states))  # every rank has the same
        return State(layout, group, dict(first.arrays))

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        layout, group, arrays = state
        split = split_of(layout, self.exact_below)
        plan = self._one_round().plan(split.selectable)
        # What is accumulated must have been hashed alike: the step is not in the key.
        sketch = CountSketch(self.rows, plan.columns, plan.tile, kernels.derive_key(group.seed, 0, SKETCH, 0, layout.bucket))
        own = sketched(sketch, split, grad).reshape(-1)
        total = yield AllReduce(kernels.concatenate([own, split.exact_of(grad)]), "sum")
        mean_sketch, exact = np.split(kernels.divide(total, group.size), [own.size])
        su = kernels.weighted_sum((self.momentum, arrays["Su"]), (1.0, mean_sketch))
        se = kernels.weighted_sum((1.0, arrays["Se"]), (1.0, su))
        u = kernels.weighted_sum((self.momentum, arrays["u"]), (1.0, exact))
        estimates = estimated(sketch, split, se.reshape(self.rows, plan.columns))
        chosen, finite = kernels.top_k(estimates, plan.k), kernels.all_finite(se)  # medians may be, where a cell is not
        mean = split.joined(chosen, estimates[chosen], u)
        touched = sketched(sketch, split, mean).reshape(-1) != 0
        su[touched], se[touched] = 0, 0
        if not finite:
            mean = abandoned(mean)
        paper = 4 * (own.size + plan.k) + 8 * exact.size
        return Outcome(mean, State(layout, group, {"Su": su, "Se": se, "u": u}), paper)
