"""Simulated workers: their gradients in one batched pass, and the mean that a method makes of them, with its bytes.

A global batch is dealt out to W workers in contiguous parts, so that W changes who has which samples and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from hvdcompress import kernels
from hvdcompress.codecs import TopK
from hvdcompress.core import Array, Group, Layout, Reducer
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.reducers import LocalTopK
from hvdcompress.reducers.accumulation import split_of
from hvdcompress.session import STATUS_BYTES

Parameters = dict[str, Tensor]
Loss = Callable[..., tuple[Tensor, Any]]  # (parameters, *batch) -> the mean over the batch, and what is kept for the next


class Diverged(ArithmeticError):
    """A gradient, or a mean, is not finite."""


class Bytes(NamedTuple):
    """Of one step and one rank, in both accountings."""

    ring: float  # sent by a rank in a ring, its status record included
    paper: float  # up and down through a parameter server, as the method's paper counts


def gradients(
    loss: Loss, parameters: Parameters, batch: tuple[Tensor, ...], workers: int
) -> tuple[Array, float, tuple[Tensor, ...]]:
    """The gradient of each worker's mean loss over its part of the batch.

    Args:
        loss: of one worker.
        parameters: by name; the same for all workers.
        batch: tensors of (samples, ...); workers divides samples.
        workers: how many.

    Returns:
        float32[workers, d] in the order of `parameters`; the mean loss; what `loss` keeps, of (samples, ...) again.
    """
    parts = [tensor.unflatten(0, (workers, -1)) for tensor in batch]
    of_workers = vmap(grad_and_value(loss, has_aux=True), in_dims=(None, *(0 for _ in parts)))
    grads, (losses, kept) = of_workers(parameters, *parts)
    flat = torch.cat([grads[name].flatten(1) for name in parameters], 1)
    return flat.numpy(), losses.mean().item(), tuple(tensor.flatten(0, 1) for tensor in kept)


def layout_of(parameters: Parameters) -> Layout:
    return Layout.of((name, tensor.shape) for name, tensor in parameters.items())


def dense_bytes(layout: Layout, workers: int) -> Bytes:
    """Of a plain allreduce, and of sending all up and down."""
    return Bytes(8 * layout.size * (workers - 1) / workers, 8 * layout.size)


def ring_bytes(reducer: Reducer, layout: Layout, workers: int) -> float:
    """What a rank sends in a step by the method's formula, and its status record, which goes round the same ring."""
    return reducer.wire_bytes(layout, Group(0, workers)) + STATUS_BYTES * (workers - 1)


class Exchange(Protocol):
    """Makes the mean of all workers' gradients."""

    rows: int
    """How many gradients it takes: one for each worker; or 1, their mean."""

    def mean(self, grads: Array) -> Array:
        """float32[rows, d] to float32[d]. Raises Diverged."""

    def bytes(self) -> Bytes:
        """Of the last step."""


class Ranks:
    """Every rank is simulated, by its own session with its own memory. The bytes are counted."""

    def __init__(self, reducer: Reducer, layout: Layout, workers: int, seed: int):
        self.rows = workers
        self.simulation = Simulation(reducer, layout, workers, seed)

    def mean(self, grads: Array) -> Array:
        means = self.simulation.step([[row] for row in grads])
        if means is None:
            raise Diverged
        return means[0]

    def bytes(self) -> Bytes:
        last = self.simulation.sessions[0].stats().last
        return Bytes(last.wire, last.paper)


class OneForAll(Ranks):
    """One rank stands for all W, in a method that is linear in the ranks' gradients. The ring's bytes are the formula's.

    Where sketching, accumulating and masking are linear and the same on all ranks, only the mean of their memories
    matters; and one rank that is given the mean gradient has that mean for its memory.
    """

    def __init__(self, reducer: Reducer, layout: Layout, workers: int, seed: int):
        super().__init__(reducer, layout, 1, seed)
        self.ring = ring_bytes(reducer, layout, workers)

    def bytes(self) -> Bytes:
        return Bytes(self.ring, super().bytes().paper)


class LockStep:
    """Local top-k without momentum on all ranks at once; ends with the bits of `LocalTopK`. The ring's bytes are the formula's.

    A rank's reducer decodes what all of them have sent, W^2 payloads in a simulation. Here they are added up once.
    """

    def __init__(self, reducer: LocalTopK, layout: Layout, workers: int):
        if reducer.momentum:
            raise ValueError(f"ranks in lock-step have no momentum, and {reducer} has")
        self.rows = workers
        self.split = split_of(layout, reducer.exact_below)
        codec, n = TopK(reducer.ratio, reducer.k), self.split.selectable
        self.k, self.payload = codec.chosen(n), codec.expected_bytes((n,))
        self.ring = ring_bytes(reducer, layout, workers)
        self.v = np.zeros((workers, layout.size), np.float32)
        self.union = 0  # coordinates that were sent in the last step, by one rank or more

    def mean(self, grads: Array) -> Array:
        self.v += grads
        total = np.zeros(self.v.shape[1], np.float32)
        for v in self.v:
            places = self.split.places(kernels.top_k(self.split.selectable_of(v), self.k))
            total[places] += v[places]
            v[places] = 0
        self.union = np.count_nonzero(total)
        for run in self.split.exact_runs:
            for v in self.v[:, run.where]:
                total[run.where] += v
                v[:] = 0
        if not np.isfinite(total).all():
            raise Diverged
        return total / np.float32(self.rows)

    def bytes(self) -> Bytes:
        return Bytes(self.ring, self.payload + 8 * self.union + 8 * self.split.exact)
