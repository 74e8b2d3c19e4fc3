"""Real gradients: of two networks on Fashion-MNIST, as they are initialised and when they have been trained for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvdcompress.core import Array, Layout

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import datasets
from pytorch_fashion_mnist import CNN

BATCH = 64
LR, MOMENTUM = 0.05, 0.9


class Block(nn.Module):
    """Two 3 x 3 convolutions around which a short cut leads."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.short(x))


class ResNet(nn.Module):
    """A small residual network for images of 28 x 28: seven 3 x 3 convolutions, 307,690 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.block1, self.block2, self.block3 = Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.conv(x)))
        x = self.block3(self.block2(self.block1(x)))
        return self.fc(x.mean((2, 3)))


NETS = {"CNN": CNN, "ResNet": ResNet}


@dataclass(frozen=True)
class Stage:
    """A network at one time, and its gradients there.

    Attributes:
        grads: float32[d] of each of several batches.
    """

    net: str
    when: str
    layout: Layout
    grads: list[Array]

    @property
    def title(self) -> str:
        return f"{self.net}, {self.when}"

    def tensors(self, name: str) -> list[Array]:
        """The gradients of one tensor, in its shape."""
        shape = self.layout.shapes[self.layout.names.index(name)]
        return [grad[self.layout.slices[name]].reshape(shape) for grad in self.grads]


def stages(net: str, batches: int, steps: int | None) -> Iterator[Stage]:
    """The network as initialised, and after so many steps of SGD with batches of `BATCH`; None: an epoch."""
    train = datasets.load().train
    x, y = torch.from_numpy(train.x), torch.from_numpy(train.y)
    torch.manual_seed(0)
    model, draws = NETS[net](), torch.Generator().manual_seed(0)
    layout = Layout.of((name, p.shape) for name, p in model.named_parameters())
    epoch = len(y) // BATCH
    steps = epoch if steps is None else min(steps, epoch)

    def looked_at(when: str) -> Stage:
        parts = torch.randperm(len(y), generator=draws)[: batches * BATCH].split(BATCH)
        return Stage(net, when, layout, [gradient(model, x[part], y[part]) for part in parts])

    yield looked_at("as initialised")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for part in torch.randperm(len(y), generator=draws)[: steps * BATCH].split(BATCH):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    yield looked_at("after an epoch" if steps == epoch else f"after {steps} steps")


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Array:
    """float32[d], of the mean loss."""
    grads = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    return np.concatenate([grad.numpy().reshape(-1) for grad in grads])
