"""What is trained: a small CNN on Fashion-MNIST, and a word-level LSTM on the State of the Union addresses.

Both are functions of a dictionary of parameters, so that the gradients of many workers are one batched pass. Neither has
anything that couples the samples of a batch (batch normalisation does): the mean gradient is the same for any number of
workers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import corpus
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from workers import Diverged, Exchange, Parameters, gradients, layout_of

from hvdcompress.core import Array

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import datasets

WARM_UP = 0.1  # share of the steps of a training


class Task(Protocol):
    """One training: its parameters, and the batches that are still to come."""

    parameters: Parameters

    def gradients(self, workers: int) -> tuple[Array, float]:
        """float32[workers, d] of the next batch, and its mean loss."""

    def score(self) -> float:
        """On what is held out. Raises Diverged."""


def uniform(draws: torch.Generator, *shape: int, fan_in: int) -> Tensor:
    """float32[shape] between -1 and 1, over the square root of fan_in."""
    return (2 * torch.rand(shape, generator=draws) - 1) / math.sqrt(fan_in)


class FashionMNIST:
    """Two convolutions and two linear layers, 215,370 parameters. The score is the accuracy in percent.

    The hidden layer is normalised sample by sample, without parameters: plain SGD then takes larger steps.

    Args:
        seed: of the initial weights and the order of the images.
        tuning: hold out the validation split and do not look at the test split; else train on both other splits.
    """

    BATCH = 256  # images, of all workers together

    def __init__(self, seed: int, tuning: bool = False):
        train, self.held_out = _images(tuning)
        self.x, self.y = map(torch.from_numpy, train)
        draws = torch.Generator().manual_seed(seed)
        self.parameters = {
            "conv1": uniform(draws, 16, 1, 5, 5, fan_in=25),
            "conv1.bias": torch.zeros(16),
            "conv2": uniform(draws, 32, 16, 5, 5, fan_in=400),
            "conv2.bias": torch.zeros(32),
            "fc1": uniform(draws, 128, 1568, fan_in=1568),
            "fc1.bias": torch.zeros(128),
            "fc2": uniform(draws, 10, 128, fan_in=128),
            "fc2.bias": torch.zeros(10),
        }
        self.batches = self._batches(draws)

    def gradients(self, workers: int) -> tuple[Array, float]:
        which = next(self.batches)
        grads, loss, _ = gradients(self.loss, self.parameters, (self.x[which], self.y[which]), workers)
        return grads, loss

    @staticmethod
    def logits(parameters: Parameters, x: Tensor) -> Tensor:
        """(samples, 10) of (samples, 1, 28, 28)."""
        p = parameters
        x = functional.relu(functional.conv2d(x, p["conv1"], p["conv1.bias"], stride=2, padding=2))
        x = functional.relu(functional.conv2d(x, p["conv2"], p["conv2.bias"], stride=2, padding=2))
        x = functional.linear(x.flatten(1), p["fc1"], p["fc1.bias"])
        x = functional.relu(functional.layer_norm(x, x.shape[1:]))
        return functional.linear(x, p["fc2"], p["fc2.bias"])

    @classmethod
    def loss(cls, parameters: Parameters, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[()]]:
        return functional.cross_entropy(cls.logits(parameters, x), y), ()

    @torch.no_grad()
    def score(self) -> float:
        x, y = map(torch.from_numpy, self.held_out)
        right = sum((self.logits(self.parameters, xs).argmax(1) == ys).sum() for xs, ys in zip(x.split(500), y.split(500)))
        return 100 * float(right) / len(y)

    def _batches(self, draws: torch.Generator) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(self.y), generator=draws)
            yield from order[: len(order) // self.BATCH * self.BATCH].split(self.BATCH)


class Addresses:
    """Embedding, one LSTM cell, and the embedding again for the output: 353,024 parameters. The score is the perplexity.

    The output's bias is the logarithm of the words' frequencies in the training part, and stays it: as a tensor of one
    dimension no method would compress it. The state of the cell goes on from batch to batch; gradients do not.

    Args:
        seed: of the initial weights and of the places where reading begins.
        tuning: hold out the validation split and do not look at the test split.
    """

    STREAMS, WORDS = 64, 10  # that a batch has of each stream; streams are dealt out to the workers
    VOCABULARY, WIDTH = 5000, 64
    HELD_OUT = (50, 1000)  # streams and words, spread evenly over the split

    def __init__(self, seed: int, tuning: bool = False):
        text = _text()
        self.train, self.held_out = map(torch.from_numpy, (text.train, text.validation if tuning else text.test))
        self.bias = torch.from_numpy(np.log(text.frequencies()).astype(np.float32))
        draws = torch.Generator().manual_seed(seed)
        self.parameters = {
            "embedding": 0.1 * torch.randn(self.VOCABULARY, self.WIDTH, generator=draws),
            "cell": uniform(draws, 4 * self.WIDTH, 2 * self.WIDTH, fan_in=2 * self.WIDTH),
            "cell.bias": torch.zeros(4 * self.WIDTH),
        }
        self.places = torch.randint(len(self.train), (self.STREAMS, 1), generator=draws)
        self.state = (torch.zeros(self.STREAMS, self.WIDTH),) * 2

    def gradients(self, workers: int) -> tuple[Array, float]:
        words = self.train[(self.places + torch.arange(self.WORDS + 1)) % len(self.train)]
        self.places = self.places + self.WORDS
        batch = (words[:, :-1], words[:, 1:], *self.state)
        grads, loss, self.state = gradients(self.loss, self.parameters, batch, workers)
        return grads, loss

    def loss(self, parameters: Parameters, x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The mean over all words, and the state after them. x and y are (streams, words), h and c (streams, width)."""
        embedding, cell, bias = parameters.values()
        outputs = []
        for x_now in embedding[x].unbind(1):
            gates = torch.cat([x_now, h], -1) @ cell.T + bias
            i, f, g, o = gates.chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        logits = torch.stack(outputs, 1).flatten(0, 1) @ embedding.T + self.bias
        return functional.cross_entropy(logits, y.flatten()), (h.detach(), c.detach())

    @torch.no_grad()
    def score(self) -> float:
        streams, words = self.HELD_OUT
        starts = torch.linspace(0, len(self.held_out) - words - 1, streams).long()
        read = self.held_out[starts[:, None] + torch.arange(words + 1)]
        state, losses = (torch.zeros(streams, self.WIDTH),) * 2, []
        for start in range(0, words, 20):
            loss, state = self.loss(self.parameters, read[:, start : start + 20], read[:, start + 1 : start + 21], *state)
            losses.append(loss.item())
        loss = sum(losses) / len(losses)
        if not loss < math.log(self.VOCABULARY):
            raise Diverged("the words are guessed worse than at random")
        return math.exp(loss)


@cache
def _images(tuning: bool) -> tuple[datasets.Images, datasets.Images]:
    splits = datasets.load()
    return (splits.train, splits.validation) if tuning else (datasets.join(splits.train, splits.validation), splits.test)


@cache
def _text() -> corpus.Corpus:
    return corpus.load(Addresses.VOCABULARY)


def train(
    task: Task, exchange: Exchange, lr: float, momentum: float, steps: int, tick: Callable[[], None] = lambda: None
) -> Array:
    """SGD with warm-up and linear decay. Returns the weights, float32[d], which are also the task's parameters.

    Raises:
        Diverged: a gradient or a mean was not finite.
    """
    layout = layout_of(task.parameters)
    weights = torch.cat([tensor.flatten() for tensor in task.parameters.values()])
    task.parameters = {name: weights[layout.slices[name]].view(shape) for name, shape in zip(layout.names, layout.shapes)}
    flat, velocity = weights.numpy(), np.zeros(layout.size, np.float32)
    for step in range(steps):
        mean = exchange.mean(task.gradients(exchange.rows)[0])
        velocity = np.float32(momentum) * velocity + mean
        flat -= np.float32(lr * min((step + 1) / (WARM_UP * steps), (steps - step) / steps)) * velocity
        tick()
    return flat
