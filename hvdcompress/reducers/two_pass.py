"""Averaging in two passes with memory, without a parameter server.

Each rank compresses its gradient, less what its memory foretells and more what it owes; whoever plays the master of a
block averages, compresses the mean with its own error, and every rank applies the code of that. There are two ways to
share the master's part, and both give the bits that one master would:

* `allgather`: every rank gathers all codes and is the master of everything. One round; (W - 1) c d bits.
* `sharded`: each rank is the master of its own run of blocks. The codes go to their owners by alltoall, the owners'
  codes to everyone by allgather. Two rounds; 2 c d (W - 1) / W bits, whatever W.

(c bits an element, d elements, W ranks.) Whoever is the master of a block keeps *every* rank's h_i on that block, moved
by the same operations as on that rank, and averages them in rank order: h is the mean of the h_i, without drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import frame, kernels, options
from ..codecs import Codec, Identity
from ..core import AllGather, AllToAll, Array, Bytes, Group, Layout, Outcome, Part, Reduction, Stage, State, Step
from .channel import ZERO, Channel
from .dense import Dense
from .figures import relative
from .states import Means

DENSE = Dense()
UPLINK, DOWNLINK = 1, 2  # streams of random draws: the first is each rank's own, the second is shared

# What `exchange="auto"` predicts with: the slow end of what people have between their nodes, what a round of Horovod costs
# before its first byte, and what a master's arithmetic takes for an element, and for each rank's code of it.
BYTES_PER_SECOND = 125e6
SECONDS_PER_ROUND = 1e-3
SECONDS_PER_ELEMENT, SECONDS_PER_CODE = 2.2e-9, 0.6e-9


class Settings(NamedTuple):
    """What a method of two passes is made of.

        rank i:  D_i = Qu(g_i - h_i + feedback e_i),   h_i += alpha D_i,   e_i = what Qu lost
        master:  q = mean (h_i + D_i) + eta e,         e = q - Qd(q)

    and beta Qd(q) is the mean.

    Attributes:
        uplink, downlink: Qu and Qd.
        alpha: rate of the memories h_i; 0: there are none.
        feedback: share of a rank's own error that is fed back; 0: it is not kept.
        beta: share of the mean's code that is applied.
        eta: share of the master's error that is fed back; 0: it is not kept.
        exchange: "allgather", "sharded", or "auto": what is predicted to be faster, or a dense allreduce without memory for a
            bucket so small, or so many ranks, that neither would save bytes.
        rescale: multiplies the errors by lr_old / lr_new, which keeps them the same in model units when the rate changes.
    """

    uplink: Codec
    downlink: Codec = Identity()
    alpha: float = 0.0
    feedback: float = 0.0
    beta: float = 1.0
    eta: float = 0.0
    exchange: str = "auto"
    rescale: bool = False

    @property
    def alignment(self) -> int:
        """In elements, where a bucket may be cut; 0: nowhere."""
        return math.lcm(self.uplink.alignment, self.downlink.alignment)

    def answers(self, exchange: str) -> bool:
        """Whether the master has a code for the mean; not where nobody is to be told and nothing is lost by telling."""
        return exchange == "sharded" or not isinstance(self.downlink, Identity)

    def check(self) -> None:
        """Raises ValueError if an option is out of its range."""
        for name in ("alpha", "feedback", "beta", "eta"):
            options.number(name, getattr(self, name), 0, 1, above=name == "beta")
        options.choice("exchange", self.exchange, ("auto", "allgather", "sharded"))
        options.flag("rescale", self.rescale)
        if self.exchange == "sharded" and not self.alignment:
            raise ValueError(f"exchange='sharded' cuts a bucket, and {self.uplink} or {self.downlink} has to see it whole")
        if not self.downlink.portable:
            raise ValueError(
                f"{self.downlink} may give other bytes on another processor: it is for what ranks send, not for the mean"
            )


class TwoPass:
    """The reducer of every method that `settings` describes; a method is a frozen dataclass of its own options."""

    whole_model: ClassVar[bool] = False

    def settings(self, layout: Layout) -> Settings:
        """What the method is for a bucket."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        self.settings(Layout.of([])).check()

    def init(self, layout: Layout, group: Group) -> State:
        settings, exchange = self.settings(layout), self._exchange(layout, group)
        arrays: dict[str, NDArray[Any]] = {}
        if exchange == "dense":
            return DENSE.init(layout, group)
        part = _parts(settings, exchange, layout, group).mine
        if settings.alpha:
            copies = kernels.zeros(group.size * part.size)
            arrays["copies"] = copies.reshape(group.size, part.size)  # h_j of each rank j
            if exchange == "sharded":
                arrays["h"] = kernels.zeros(layout.size)
        if settings.feedback:
            arrays["own_e"] = kernels.zeros(layout.size)
        if settings.eta and settings.answers(exchange):
            arrays["e"] = kernels.zeros(part.size)
        if settings.rescale:
            arrays["lr"] = np.full(1, np.nan)  # the rate that the errors belong to
        return State(layout, group, arrays)

    def stages(self, layout: Layout, group: Group) -> tuple[Stage, ...]:
        return {
            "dense": DENSE.stages(layout, group),
            "allgather": (Stage(AllGather),),
            "sharded": (Stage(AllToAll), Stage(AllGather)),
        }[self._exchange(layout, group)]

    def wire_bytes(self, layout: Layout, group: Group, metrics: Mapping[str, float] | None = None) -> float:
        return _predict(self.settings(layout), self._exchange(layout, group), layout, group.size, metrics or {})

    def residual(self, state: State) -> float:
        return sum(kernels.sum_of_squares(state.arrays[name]) for name in ("own_e", "e") if name in state.arrays)

    def redistribute(self, states: Iterable[State], layout: Layout, group: Group) -> State:
        """As `Reducer` has it: h_i becomes the mean of the h_i, e_i that of the e_i, and e is cut anew."""
        settings, new, means, e, lr = self.settings(layout), self.init(layout, group), Means(), kernels.zeros(layout.size), None
        for state in states:
            own, exchange = dict(state.arrays), self._exchange(layout, state.group)
            if "copies" in own:
                own.setdefault("h", own["copies"][state.group.rank])
            means.add({name: own[name] for name in ("h", "own_e") if name in own})
            if "e" in own:
                e[_parts(settings, exchange, layout, state.group).mine.where] = own["e"]
            lr = own.get("lr", lr)
        if not new.arrays:
            return new
        part, zeros = _parts(settings, self._exchange(layout, group), layout, group).mine, kernels.zeros(layout.size)
        h = means.get("h", zeros)
        arrays = {
            "copies": np.tile(h[part.where], (group.size, 1)),
            "h": h,
            "own_e": means.get("own_e", zeros),
            "e": e[part.where],
        }
        if lr is not None:
            arrays["lr"] = lr
        return new._replace(arrays={name: arrays.get(name, array).copy() for name, array in new.arrays.items()})

    def reduce(self, grad: Array, state: State, step: Step) -> Reduction:
        layout, group, arrays = state
        settings, exchange = self.settings(layout), self._exchange(layout, group)
        if exchange == "dense":
            return (yield from DENSE.reduce(grad, state, step))
        sharded, parts = exchange == "sharded", _parts(settings, exchange, layout, group)
        up, down = (Channel(codec, layout.bucket, step.number) for codec in (settings.uplink, settings.downlink))
        scale, memory = _rescaling(settings, arrays, step)

        message, minus = grad, None
        if settings.alpha:
            minus = arrays["h"] if sharded else arrays["copies"][group.rank]
        if settings.feedback:
            terms = [(1.0, grad)] if minus is None else [(1.0, grad), (-1.0, minus)]
            message, minus = kernels.weighted_sum(*terms, (settings.feedback * scale, arrays["own_e"])), None
        key = kernels.derive_key(group.seed, step.number, UPLINK, group.rank, layout.bucket)
        packed = (up.pack(message[p.where], key, p.start, None if minus is None else minus[p.where]) for p in parts.all)
        sent, noise = zip(*packed)
        received = yield (AllToAll(list(sent)) if sharded else AllGather(sent[0]))

        # What is of this rank alone is done here, while other buckets may still be on their way.
        for name, start, factor in (("h", arrays.get("h"), settings.alpha), ("own_e", message, -1.0)):
            if name in arrays and start is not None:
                memory[name] = kernels.empty(layout.size)
                for part, own in zip(parts.all, sent):
                    up.add(own, group.rank, memory[name][part.where], factor, base=start[part.where])

        mean, code, of_master, metrics = self._master(received, state, step, settings, scale)
        memory.update(of_master)
        metrics["uplink_noise"] = relative(sum(noise), step.squares)
        codes: list[Bytes] = []
        if code is not None:
            codes = (yield AllGather(code)) if sharded else [code]
            mean, metrics["downlink_density"] = kernels.empty(layout.size), 0.0
            for owner, (part, code) in enumerate(zip(parts.all, codes)):
                density = down.add(code, owner, mean[part.where], settings.beta, base=ZERO)
                metrics["downlink_density"] += density * part.size / max(1, layout.size)
        paper_bytes = _payload_bytes(sent) + (_payload_bytes(codes) if codes else 4 * layout.size)
        return Outcome(mean, State(layout, group, memory), paper_bytes, metrics)

    def _master(
        self, received: list[Bytes], state: State, step: Step, settings: Settings, scale: float
    ) -> tuple[Array, Bytes | None, dict[str, NDArray[Any]], dict[str, float]]:
        """The master's part of a step: what it applies, its code of that if it has one, its memory, and what is told of them."""
        layout, group, arrays = state
        exchange = self._exchange(layout, group)
        part = _parts(settings, exchange, layout, group).mine
        up, down = (Channel(codec, layout.bucket, step.number) for codec in (settings.uplink, settings.downlink))
        total, density, memory = kernels.empty(part.size), 0.0, {}
        for sender, buffer in enumerate(received):
            density += up.add(buffer, sender, total, base=None if sender else ZERO) / group.size
        mean = kernels.divide(total, group.size)
        if settings.alpha:
            memory["copies"] = kernels.empty(arrays["copies"].size).reshape(group.size, part.size)
            for sender, buffer in enumerate(received):
                up.add(buffer, sender, memory["copies"][sender], settings.alpha, base=arrays["copies"][sender])
            h = kernels.divide(kernels.weighted_sum(*((1.0, row) for row in arrays["copies"])), group.size)
            mean = kernels.weighted_sum((1.0, h), (1.0, mean))
        metrics = {"uplink_density": density}
        if not settings.answers(exchange):
            return kernels.weighted_sum((settings.beta, mean)), None, memory, metrics
        owed = kernels.weighted_sum((1.0, mean), (settings.eta * scale, arrays["e"])) if settings.eta else mean
        key = kernels.derive_key(group.seed, step.number, DOWNLINK, 0, layout.bucket)
        code, noise = down.pack(owed, key, part.start)
        if settings.eta:
            memory["e"] = kernels.empty(part.size)
            down.add(code, group.rank, memory["e"], -1.0, base=owed)
        metrics["downlink_noise"] = relative(noise, kernels.sum_of_squares(mean))
        return mean, code, memory, metrics

    def _exchange(self, layout: Layout, group: Group) -> str:
        settings = self.settings(layout)
        return _choose(settings, layout, group.size) if settings.exchange == "auto" else settings.exchange


class Parts(NamedTuple):
    """Who is the master of what."""

    all: tuple[Part, ...]  # by owner
    mine: Part  # the one that this rank is the master of


def _parts(settings: Settings, exchange: str, layout: Layout, group: Group) -> Parts:
    if exchange != "sharded":
        whole = Part(0, layout.size)
        return Parts((whole,), whole)
    parts = _divide(layout.size, group.size, settings.alignment)
    return Parts(parts, parts[group.rank])


def _rescaling(settings: Settings, arrays: Mapping[str, NDArray[Any]], step: Step) -> tuple[float, dict[str, NDArray[Any]]]:
    """What the errors are multiplied by in this step, and the rate that they will belong to."""
    if not settings.rescale:
        return 1.0, {}
    if step.lr is None:
        raise ValueError("rescale=True needs the learning rate of each step: give the compressor the optimizer")
    old = float(arrays["lr"][0])
    if step.lr == 0 or not old > 0:
        return 1.0, {"lr": np.full(1, step.lr if step.lr else old)}
    return old / step.lr, {"lr": np.full(1, step.lr)}


def _payload_bytes(frames: Iterable[Bytes]) -> int:
    return sum(buffer.size - frame.HEADER.size for buffer in frames)


def _predict(settings: Settings, exchange: str, layout: Layout, ranks: int, metrics: Mapping[str, float]) -> float:
    if exchange == "dense":
        return DENSE.wire_bytes(layout, Group(0, ranks))
    parts = _divide(layout.size, ranks if exchange == "sharded" else 1, settings.alignment)
    sent, codes = (
        sum(frame.HEADER.size + codec.expected_bytes((part.size,), metrics.get(density)) for part in parts)
        for codec, density in ((settings.uplink, "uplink_density"), (settings.downlink, "downlink_density"))
    )
    return (ranks - 1) * sent if exchange == "allgather" else (ranks - 1) / ranks * (sent + codes)


@lru_cache(maxsize=4096)
def _choose(settings: Settings, layout: Layout, ranks: int) -> str:
    """What is predicted to be the fastest of the exchanges that send fewer bytes than a dense allreduce."""
    if ranks == 1:
        return "allgather"
    rounds = {"allgather": 1, "sharded": 2} if settings.alignment else {"allgather": 1}
    sent = {name: _predict(settings, name, layout, ranks, {}) for name in rounds}
    dense = _predict(settings, "dense", layout, ranks, {})
    worthwhile = [name for name in rounds if sent[name] < dense]

    def seconds(name: str) -> float:
        mastered = layout.size / (ranks if name == "sharded" else 1)
        arithmetic = mastered * (SECONDS_PER_ELEMENT + ranks * SECONDS_PER_CODE)
        return sent[name] / BYTES_PER_SECOND + rounds[name] * SECONDS_PER_ROUND + arithmetic

    return min(worthwhile, key=seconds, default="dense")


@lru_cache(maxsize=4096)
def _divide(n: int, owners: int, alignment: int) -> tuple[Part, ...]:
    """Runs of n elements for each owner, cut at multiples of `alignment`, as even as that allows."""
    if owners == 1:
        return (Part(0, n),)
    pieces = -(-n // alignment)
    cuts = [min(n, owner * pieces // owners * alignment) for owner in range(owners + 1)]
    return tuple(Part(start, stop) for start, stop in zip(cuts, cuts[1:]))
