"""DORE: double residual compression, without a parameter server.

Each rank compresses what its gradient adds to its memory h_i; whoever plays the master of a block averages, compresses
what is left with its own error, and every rank applies the code of that. There are two ways to share the master's part,
and both give the bits that one master would:

* `allgather`: every rank gathers all residuals and is the master of everything. One round; (W - 1) c d bits.
* `sharded`: each rank is the master of its own run of blocks. The residuals go to their owners by alltoall, the owners'
  codes to everyone by allgather. Two rounds; 2 c d (W - 1) / W bits, whatever W.

(c bits an element, d elements, W ranks.) Whoever is the master of a block keeps *every* rank's h_i on that block, moved
by the same operations as on that rank, and averages them in rank order: h is the mean of the h_i, without drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import frame, kernels
from ..codecs import Codec, Ternary
from ..core import AllGather, AllToAll, Array, Bytes, Group, Layout, Outcome, Part, Reduction, Stage, State, Step
from .channel import Channel
from .dense import Dense
from .figures import relative

DENSE = Dense()
UPLINK, DOWNLINK = 1, 2  # streams of random draws: the first is each rank's own, the second is shared

# What `exchange="auto"` predicts with: the slow end of what people have between their nodes, and what a round of
# Horovod costs before its first byte.
BYTES_PER_SECOND = 125e6
SECONDS_PER_ROUND = 1e-3


@dataclass(frozen=True)
class Dore:
    """Double residual compression.

    With h = mean h_i, gh = h + mean D_i and q = gh + eta e:

        rank i:  D_i = Q(g_i - h_i),   h_i += alpha D_i
        master:  G = beta Q(q),        e = q - Q(q)

    and G is the mean that the optimizer is given.

    Payload: Q's codes, see `Ternary`: scales, mask, signs. Bias: each Q is unbiased; e carries the error of the second
    to the next step. Memory, float32: W d for `allgather` with e d more; d + (W + 1) d / W for `sharded`.

    The paper compresses the *model* residual, -lr q, and applies it to the model. Here e stays in gradient units and G
    goes through the optimizer. The two are the same when: the optimizer is plain SGD, x -= lr G, with nothing after G
    (no momentum, no adaptivity, no clipping; weight decay inside g_i); there is no proximal term; one lr holds inside
    each block; Q is homogeneous and odd for given draws, as the ternary codec is; and lr is constant, or `rescale` is
    on. They are bitwise the same where lr, its ratio, beta and eta are powers of two or sums of few of them; else
    rounding flips single draws and both are correct runs of DORE. With another optimizer this is error feedback on the
    mean gradient, before the optimizer.

    Args:
        alpha: rate of the memories h_i, in [0, 1]; 0 is no memory.
        beta: share of the code that is applied, in (0, 1].
        eta: share of the error that is fed back, in [0, 1]. 1 is the experiments' value and the fragile one: it holds
            for small steps only; 0.5 holds for steps 4 to 8 times larger.
        block: elements that share a scale. Smaller blocks have less noise and more bytes of scales.
        scales: "float32" or "byte" (rounded up; a quarter of the size).
        exchange: "allgather", "sharded", or "auto": what is predicted to be faster, or a dense allreduce without memory for a
            bucket so small, or so many ranks, that neither would save bytes.
        rescale: multiplies e by lr_old / lr_new, which keeps it the same in model units when the rate changes. Each
            step must then be told its rate. A rate of zero changes nothing.
        uplink, downlink: another codec than Ternary(block, scales), for the first or the second residual.

    Raises:
        ValueError: an option is out of its range.

    >>> Dore(block=64, scales="byte").alpha
    0.1

    Source: X. Liu, Y. Li, J. Tang, M. Yan, "A Double Residual Compression Algorithm for Efficient Distributed
    Learning", 2020, Algorithm 1; alpha, beta, eta, block and the norm are those of its experiments.
    """

    whole_model: ClassVar[bool] = False

    alpha: float = 0.1
    beta: float = 1.0
    eta: float = 1.0
    block: int = 256
    scales: str = "float32"
    exchange: str = "auto"
    rescale: bool = False
    uplink: Codec | None = None
    downlink: Codec | None = None

    def __post_init__(self) -> None:
        for name, low_open in (("alpha", False), ("beta", True), ("eta", False)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not (0 <= value <= 1) or (low_open and value == 0):
                raise ValueError(f"{name} must be in {'(' if low_open else '['}0, 1], not {value!r}")
        if self.exchange not in ("auto", "allgather", "sharded"):
            raise ValueError(f"exchange must be 'auto', 'allgather' or 'sharded', not {self.exchange!r}")
        Ternary(self.block, self.scales)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of the first and of the second residual."""
        usual: Codec = Ternary(self.block, self.scales)
        return self.uplink or usual, self.downlink or usual

    def init(self, layout: Layout, group: Group) -> State:
        if self._exchange(layout, group) == "dense":
            return DENSE.init(layout, group)
        part = self._parts(layout, group).mine
        arrays = {
            "copies": kernels.zeros(group.size * part.size).reshape(group.size, part.size),  # h_j of each rank j
            "e": kernels.zeros(part.size),
        }
        if self._exchange(layout, group) == "sharded":
            arrays["h"] = kernels.zeros(layout.size)
        if self.rescale:
            arrays["lr"] = np.full(1, np.nan)  # the rate that e belongs to
        return State(layout, group, arrays)

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        return {
            "dense": DENSE.stages(layout, group),
            "allgather": (Stage(AllGather),),
            "sharded": (Stage(AllToAll), Stage(AllGather)),
        }[self._exchange(layout, group)]

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        layout, group, arrays = state
        exchange = self._exchange(layout, group)
        if exchange == "dense":
            return (yield from DENSE.reduce(grad, state, step))
        sharded, parts = exchange == "sharded", self._parts(layout, group)
        up, down = (Channel(codec, layout.bucket, step.number) for codec in self.codecs)
        h = arrays["h"] if sharded else arrays["copies"][group.rank]

        residual = kernels.weighted_sum((1.0, grad), (-1.0, h))
        key = kernels.derive_key(group.seed, step.number, UPLINK, group.rank, layout.bucket)
        sent = [up.pack(residual[part.where], key, part.start) for part in parts.all]
        received = yield (AllToAll(sent) if sharded else AllGather(sent[0]))

        code, memory, metrics = self._master(received, state, step, up, down)
        codes = (yield AllGather(code)) if sharded else [code]

        mean = kernels.zeros(layout.size)
        for owner, (part, code) in enumerate(zip(parts.all, codes)):
            down.add(code, owner, mean[part.where], self.beta)
        if sharded:
            memory["h"] = h.copy()
            for owner, part in enumerate(parts.all):
                up.add(sent[owner], group.rank, memory["h"][part.where], self.alpha)
        metrics["uplink_noise"] = relative(up.codec.noise(residual), grad)
        headers = frame.HEADER.size * (len(sent) + len(codes) - 2)
        paper_bytes = sum(f.size for f in sent) + sum(c.size for c in codes) - headers
        return Outcome(mean, State(layout, group, memory), paper_bytes, metrics)

    def _master(
        self, received: list[Bytes], state: State, step: Step, up: Channel, down: Channel
    ) -> tuple[Bytes, dict[str, NDArray[Any]], dict[str, float]]:
        """The master's part of a step: the code of the second residual, copies and e, and what is told of them."""
        layout, group, arrays = state
        part = self._parts(layout, group).mine
        copies, total, density = arrays["copies"].copy(), kernels.zeros(part.size), 0.0
        for sender, buffer in enumerate(received):
            density += up.add(buffer, sender, total) / group.size
            up.add(buffer, sender, copies[sender], self.alpha)
        h = kernels.divide(kernels.weighted_sum(*((1.0, row) for row in arrays["copies"])), group.size)
        estimate = kernels.weighted_sum((1.0, h), (1.0, kernels.divide(total, group.size)))
        fed_back, lr = self._feedback(arrays, step)
        residual = kernels.weighted_sum((1.0, estimate), (fed_back, arrays["e"]))

        key = kernels.derive_key(group.seed, step.number, DOWNLINK, 0, layout.bucket)
        code, e = down.pack(residual, key, part.start), residual.copy()
        metrics = {
            "uplink_density": density,
            "downlink_density": down.add(code, group.rank, e, -1.0),
            "downlink_noise": relative(down.codec.noise(residual), estimate),
        }
        return code, {"copies": copies, "e": e, **lr}, metrics

    def _feedback(self, arrays: Mapping[str, NDArray[Any]], step: Step) -> tuple[float, dict[str, NDArray[Any]]]:
        """The factor of e in this step, and the rate that e will belong to."""
        if not self.rescale:
            return self.eta, {}
        if step.lr is None:
            raise ValueError("rescale=True needs the learning rate of each step: give the compressor the optimizer")
        old = float(arrays["lr"][0])
        if step.lr == 0 or not old > 0:
            return self.eta, {"lr": np.full(1, step.lr if step.lr else old)}
        return self.eta * old / step.lr, {"lr": np.full(1, step.lr)}

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return self._predict(self._exchange(layout, group), layout.size, group.size, metrics or {})

    def _predict(self, exchange: str, n: int, ranks: int, metrics: Mapping[str, float]) -> float:
        if exchange == "dense":
            return DENSE.wire_bytes(Layout.of([("", (n,))]), Group(0, ranks))
        up, down = self.codecs
        up_density, down_density = metrics.get("uplink_density"), metrics.get("downlink_density")
        parts = _divide(n, ranks if exchange == "sharded" else 1, self._alignment)
        sent = sum(frame.HEADER.size + up.expected_bytes(part.size, up_density) for part in parts)
        if exchange == "allgather":
            return (ranks - 1) * sent
        codes = sum(frame.HEADER.size + down.expected_bytes(part.size, down_density) for part in parts)
        return (ranks - 1) / ranks * (sent + codes)

    def _exchange(self, layout: Layout, group: Group) -> str:
        return _choose(self, layout.size, group.size) if self.exchange == "auto" else self.exchange

    @property
    def _alignment(self) -> int:
        return math.lcm(*(codec.alignment for codec in self.codecs))

    def _parts(self, layout: Layout, group: Group) -> Parts:
        if self._exchange(layout, group) != "sharded":
            whole = Part(0, layout.size)
            return Parts((whole,), whole)
        parts = _divide(layout.size, group.size, self._alignment)
        return Parts(parts, parts[group.rank])


class Parts(NamedTuple):
    """Who is the master of what."""

    all: tuple[Part, ...]  # by owner
    mine: Part  # the one that this rank is the master of


@lru_cache(maxsize=4096)
def _choose(method: Dore, n: int, ranks: int) -> str:
    """What is predicted to be the fastest of the exchanges that send fewer bytes than a dense allreduce."""
    if ranks == 1:
        return "allgather"
    rounds = {"allgather": 1, "sharded": 2}
    sent = {name: method._predict(name, n, ranks, {}) for name in rounds}
    dense = method._predict("dense", n, ranks, {})
    worthwhile = [name for name in rounds if sent[name] < dense]
    return min(worthwhile, key=lambda name: sent[name] / BYTES_PER_SECOND + rounds[name] * SECONDS_PER_ROUND, default="dense")


@lru_cache(maxsize=4096)
def _divide(n: int, owners: int, alignment: int) -> tuple[Part, ...]:
    """Runs of n elements for each owner, cut at multiples of `alignment`, as even as that allows."""
    pieces = -(-n // alignment)
    cuts = [min(n, owner * pieces // owners * alignment) for owner in range(owners + 1)]
    return tuple(Part(start, stop) for start, stop in zip(cuts, cuts[1:]))
