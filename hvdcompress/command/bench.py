"""What the ranks of `hvdcompress bench` measure: the network between them, their arithmetic, and a step of each method.

The gradients are drawn, of the sizes of a model, and nothing else is computed: a step is what a training would wait for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..codecs import Ternary
from .models import BATCH, Tensors, gradient
from .plan import Network

TARGET_SECONDS = 0.4  # of one large exchange
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 26
SMALL = 20  # rounds of a few bytes, for the latency
KERNEL_ELEMENTS, KERNEL_SECONDS = 1 << 20, 1.0


class Ranks:
    """This rank among the others, over Horovod's PyTorch operations.

    Raises:
        ImportError: horovod.torch is not there.
    """

    def __init__(self) -> None:
        import horovod.torch as hvd
        import torch

        self.hvd, self.torch = hvd, torch
        torch.set_num_threads(1)
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def mean(self, value: float) -> float:
        return float(self.hvd.allreduce(self.torch.tensor(value, dtype=self.torch.float64), name="mean"))

    def timed(self, call: Callable[[], Any]) -> float:
        """Mean seconds over ranks, which begin together."""
        self.mean(0.0)
        began = time.perf_counter()
        call()
        return self.mean(time.perf_counter() - began)

    # The network

    def network(self) -> Network:
        """Rates, latency and contention, as they are between these ranks now."""
        latency = statistics.median(self.timed(lambda: self._gather(32)) for _ in range(SMALL))
        share = (self.size - 1) / self.size
        allreduce, exchange = (
            factor * share * self._rate(call, latency) for call, factor in ((self._sum, 2), (self._all_to_all, 1))
        )
        return Network(exchange, allreduce, latency, self.contention())

    def _rate(self, call: Callable[[int], Any], latency: float) -> float:
        """Bytes a second of an exchange that is large enough to take a while; the median of three."""
        size, took = FIRST_BYTES, self.timed(partial(call, FIRST_BYTES))
        while took < TARGET_SECONDS and size < MOST_BYTES:
            size = min(MOST_BYTES, int(size * max(2.0, min(16.0, TARGET_SECONDS / took))))
            took = self.timed(partial(call, size))
        took = statistics.median([took, *(self.timed(partial(call, size)) for _ in range(2))])
        return size / max(took - latency, 1e-9)

    def _sum(self, size: int) -> None:
        self.hvd.allreduce(self.torch.zeros(size // 4), name=f"bench.sum.{size}")

    def _gather(self, size: int) -> None:
        self.hvd.allgather(self.torch.zeros(size, dtype=self.torch.uint8), name=f"bench.gather.{size}")

    def _all_to_all(self, size: int) -> None:
        each = size // self.size
        splits = self.torch.full((self.size,), each, dtype=self.torch.int32)
        self.hvd.alltoall(self.torch.zeros(each * self.size, dtype=self.torch.uint8), splits, name=f"bench.alltoall.{size}")

    def contention(self) -> float:
        """Seconds that arithmetic takes while every rank computes, in seconds of a processor."""
        self.mean(0.0)
        began, before, codec, x = time.perf_counter(), time.thread_time(), Ternary(), _drawn(KERNEL_ELEMENTS)
        while time.perf_counter() - began < KERNEL_SECONDS:
            codec.encode(x, key=0)
        return self.mean(max(1.0, (time.perf_counter() - began) / (time.thread_time() - before)))

    def kernels(self) -> dict[str, float]:
        """Seconds an element of ternary codes, while every rank computes."""
        codec, x, times = Ternary(), _drawn(KERNEL_ELEMENTS), []
        out = np.zeros_like(x)
        for _ in range(9):
            began = time.perf_counter()
            payload = codec.encode(x, key=0).payload
            middle = time.perf_counter()
            codec.decode_add(payload, out)
            times.append((middle - began, time.perf_counter() - middle))
        names = ("ternary encode", "ternary decode and add")
        return {name: self.mean(statistics.median(part)) / x.size for name, part in zip(names, zip(*times))}

    # The methods

    def steps(
        self, tensors: Tensors, methods: Sequence[str], repeats: int, on_each: Callable[[str], None], batch: int = BATCH
    ) -> dict[str, dict[str, Any]]:
        """Seconds and bytes of a step by each method, which take turns; `on_each` is called before each step."""
        made = {method: self._stepper(tensors, method, batch) for method in methods}
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        for turn in range(1 + repeats):
            for method, (step, _) in made.items():
                on_each(method)
                took = self.timed(step)
                if turn:
                    seconds[method].append(took)
        return {
            method: {"seconds": seconds[method], "bytes": getattr(compression, "predicted_bytes", lambda: None)()}
            for method, (_, compression) in made.items()
        }

    def _stepper(self, tensors: Tensors, method: str, batch: int) -> tuple[Callable[[], None], Any]:
        """A training whose gradients are there at once."""
        from .. import torch as hvc

        torch = self.torch
        parameters = [(f"{method}.{name}", torch.nn.Parameter(torch.zeros(shape))) for name, shape in tensors]
        slopes = [torch.from_numpy(gradient([shape], batch, self.rank)).view(shape) for _, shape in tensors]
        optimizer = torch.optim.SGD([p for _, p in parameters], lr=0.0)
        compression = hvc.Compression.parse(method, parameters)
        wrapped = self.hvd.DistributedOptimizer(optimizer, named_parameters=parameters, compression=compression)

        def step() -> None:
            wrapped.zero_grad()
            sum(torch.dot(p.reshape(-1), slope.reshape(-1)) for (_, p), slope in zip(parameters, slopes)).backward()
            wrapped.step()

        return step, compression


def _drawn(n: int) -> Any:
    return np.random.default_rng(0).standard_normal(n, dtype=np.float32)
