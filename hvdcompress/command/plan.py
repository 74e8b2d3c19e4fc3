"""What a step would cost with each method: bytes by the methods' formulas, arithmetic as measured here, the network as told.

    step = compute + arithmetic x contention + bytes / rate + rounds x latency

Horovod's own allreduces go on beside the backward pass, up to half of the computing. Codes do so too, but the second part of
their way begins when the backward pass has ended on every rank: nothing of it is taken to overlap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from threadpoolctl import threadpool_limits

from .. import reducers, spec, traffic
from ..adapter import Cut, Tensor
from ..core import AllReduce, Group, Layout, Reducer
from ..drivers.simulate import Simulation
from ..session import STATUS_BYTES
from .models import BATCH, Tensors, gradient

HOROVODS = {"none": 4, "fp16": 2}  # bytes an element
METHODS = ("none", "fp16", "dore", "sketch:momentum=0", "atomo", "qsgd", "topk")
FRAMES = 1.0456  # Ethernet, IP and TCP headers: bytes on the wire for a byte of payload, at an MTU of 1500
WORTH = 0.05  # a method that gains less than this share of a step is not worth its noise
REPEATS = 3
OVERLAP = 0.5  # of the computing
CUT_OPTIONS = ("bucket_mb", "dense_below")


@dataclass(frozen=True)
class Network:
    """What is between the ranks.

    Attributes:
        exchange: bytes a second of allgathers and alltoalls, that a rank sends while it receives as many.
        allreduce: the same, of allreduces.
        latency: seconds of one round of Horovod's: negotiation, and what the network takes for the first byte.
        contention: seconds that the ranks' arithmetic takes, in seconds of a processor of their own; 1 where each has one.
    """

    exchange: float
    allreduce: float
    latency: float = 2e-3
    contention: float = 1.0

    @classmethod
    def of_rate(cls, bits_per_second: float, latency: float = 2e-3, contention: float = 1.0) -> Network:
        """An Ethernet link of a nominal rate."""
        rate = bits_per_second / 8 / FRAMES
        return cls(rate, rate, latency, contention)


class Cost(NamedTuple):
    """Of a step with one method, on each rank.

    Attributes:
        method: as `Compression.parse` takes it.
        bytes: that a rank sends.
        arithmetic: seconds of a processor.
        wire: seconds that the network moves bytes.
        rounds: collectives that wait for one another.
        seconds: of the step, with the compute that was told.
    """

    method: str
    bytes: float
    arithmetic: float
    wire: float
    rounds: int
    seconds: float


class Handling(NamedTuple):
    """Seconds of a processor that the adapters and Horovod take beside the methods' arithmetic."""

    element: float = 1.2e-9  # of a compressed tensor: copied into a bucket, and looked at
    half: float = 1.5e-9  # of fp16: rounded, and widened again
    tensor: float = 1.5e-4  # a token, its negotiation, and Python's share


HANDLING = Handling()


def costs(
    tensors: Tensors,
    ranks: int,
    network: Network,
    methods: Sequence[str] = METHODS,
    compute: float = 0.0,
    on_each: Callable[[str], None] = lambda method: None,
    batch: int = BATCH,
) -> list[Cost]:
    """The cost of a step by each method; `on_each` is called before each. `batch` is the examples of a rank and step.

    Raises:
        ValueError: a method or an option is unknown, or out of its range.
    """
    found = []
    for method in methods:
        on_each(method)
        one = _horovods(method, tensors, ranks, network) if method in HOROVODS else _ours(method, tensors, ranks, network, batch)
        beside = min(one.wire, OVERLAP * compute) if method in HOROVODS else 0.0
        seconds = compute + one.arithmetic * network.contention + one.wire + one.rounds * network.latency - beside
        found.append(one._replace(seconds=seconds))
    return found


class Advice(NamedTuple):
    """The best of Horovod's own, the best of all, and whether that is worth it."""

    plain: Cost | None
    best: Cost
    compress: bool


def advice(found: Sequence[Cost]) -> Advice:
    """What to take."""
    plain = min((cost for cost in found if cost.method in HOROVODS), key=lambda cost: cost.seconds, default=None)
    best = min(found, key=lambda cost: cost.seconds)
    compress = plain is None or best.seconds < (1 - WORTH) * plain.seconds
    return Advice(plain, best, compress and best.method not in HOROVODS)


def _horovods(method: str, tensors: Tensors, ranks: int, network: Network) -> Cost:
    n = sum(math.prod(shape) for _, shape in tensors)
    sent = traffic.allreduced(HOROVODS[method] * n, ranks).wire
    arithmetic = HANDLING.half * n if method == "fp16" else 0.0
    return Cost(method, sent, arithmetic, sent / network.allreduce, 1, 0.0)


def _ours(text: str, tensors: Tensors, ranks: int, network: Network, batch: int) -> Cost:
    name, options = spec.parse(text)
    own = {key: options.pop(key) for key in CUT_OPTIONS if key in options}
    method = reducers.make(name, **options)
    cut = Cut(method.whole_model, **own)
    where, layouts = cut.buckets(Tensor(name, shape) for name, shape in reversed(tensors))
    dense = sum(math.prod(shape) for (_, shape), bucket in zip(reversed(tensors), where) if bucket is None)
    group = Group(0, ranks)
    gathered = float((ranks - 1) * STATUS_BYTES)
    summed = traffic.allreduced(4 * dense + 8 * len(tensors), ranks).wire
    rounds, arithmetic = 1, HANDLING.tensor * len(tensors)
    measured: dict[Any, _Measured] = {}
    for layout in layouts:
        if layout.shapes not in measured:
            measured[layout.shapes] = _measure(method, Layout.of(zip(layout.names, layout.shapes)), ranks, batch)
        one, stages = measured[layout.shapes], method.stages(layout, group)
        sent = method.wire_bytes(layout, group, one.metrics)
        if all(stage.kind is AllReduce for stage in stages):
            summed += sent
        else:
            gathered += sent
        rounds = max(rounds, 1 + len(stages))
        arithmetic += one.seconds + HANDLING.element * layout.size
    wire = gathered / network.exchange + summed / network.allreduce
    return Cost(text, gathered + summed, arithmetic, wire, rounds, 0.0)


class _Measured(NamedTuple):
    seconds: float  # of a rank's arithmetic in a step
    metrics: dict[str, float]


MOST_SIMULATED = 8  # ranks; beyond them arithmetic grows as it did up to them


def _measure(method: Reducer, layout: Layout, ranks: int, batch: int) -> _Measured:
    """Steps of one bucket among simulated ranks, of which the first one's time is taken."""
    if method.whole_model:
        return _simulated(method, layout, 2, batch)  # sums have one reply, whatever the ranks
    if ranks <= MOST_SIMULATED:
        return _simulated(method, layout, ranks, batch)
    few, most = (_simulated(method, layout, n, batch) for n in (MOST_SIMULATED // 2, MOST_SIMULATED))
    growth = (most.seconds - few.seconds) / (MOST_SIMULATED - MOST_SIMULATED // 2)
    return most._replace(seconds=most.seconds + max(0.0, growth) * (ranks - MOST_SIMULATED))


def _simulated(method: Reducer, layout: Layout, ranks: int, batch: int) -> _Measured:
    simulation, times = Simulation(method, layout, ranks), []
    first, drawn = simulation.sessions[0], [gradient(layout.shapes, batch, seed) for seed in range(2)]
    grads = [[drawn[rank % 2]] for rank in range(ranks)]
    with threadpool_limits(1):  # as a rank has it, which does not have the host for itself
        for _ in range(1 + REPEATS):
            before = sum(first.seconds.values())
            simulation.step_each(grads)
            times.append(sum(first.seconds.values()) - before)
    return _Measured(statistics.median(times[1:]), dict(first.metrics))
