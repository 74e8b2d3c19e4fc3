"""Layer sizes: of well-known networks by name, from text, or of a PyTorch model of the user's; and gradients of such sizes."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tensors = list[tuple[str, tuple[int, ...]]]  # names and shapes, in the order of the layers

Shape = tuple[int, ...]

BATCH = 64  # examples a rank, where nothing else is told


def _dense(*widths: int) -> Iterator[Shape]:
    """Linear layers with biases."""
    for inputs, outputs in zip(widths, widths[1:]):
        yield from ((outputs, inputs), (outputs,))


def _convolution(inputs: int, outputs: int, side: int, bias: bool = False) -> Iterator[Shape]:
    """A convolution, and its bias or else a batch normalisation after it."""
    yield (outputs, inputs, side, side)
    yield from ((outputs,),) if bias else ((outputs,), (outputs,))


def _mlp() -> Iterator[Shape]:
    yield from _dense(784, 1500, 1500, 1500, 10)


def _small() -> Iterator[Shape]:
    yield from _dense(784, 512, 512, 10)


def _cnn() -> Iterator[Shape]:
    yield from _convolution(1, 16, 5, bias=True)
    yield from _convolution(16, 32, 5, bias=True)
    yield from ((32,), (32,))
    yield from _dense(1568, 128, 10)


def _lstm() -> Iterator[Shape]:
    words, width = 10_000, 200
    yield (words, width)
    for _ in range(2):
        yield from ((4 * width, width), (4 * width, width), (4 * width,), (4 * width,))
    yield from _dense(width, words)


def _vgg16() -> Iterator[Shape]:
    inputs = 3
    for outputs in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        yield from _convolution(inputs, outputs, 3, bias=True)
        inputs = outputs
    yield from _dense(512 * 49, 4096, 4096, 1000)


def _resnet50() -> Iterator[Shape]:
    yield from _convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from _convolution(inputs, width, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width, 4 * width, 1)
            if not block:
                yield from _convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    yield from _dense(2048, 1000)


def _bert_base() -> Iterator[Shape]:
    width = 768
    yield from ((30_522, width), (512, width), (2, width), (width,), (width,))
    for _ in range(12):
        for _ in range(4):
            yield from _dense(width, width)
        yield from ((width,), (width,))
        yield from _dense(width, 4 * width, width)
        yield from ((width,), (width,))
    yield from _dense(width, width)


def _gpt2() -> Iterator[Shape]:
    width = 768
    yield from ((50_257, width), (1024, width))
    for _ in range(12):
        yield from ((width,), (width,))
        yield from _dense(width, 3 * width)
        yield from _dense(width, width)
        yield from ((width,), (width,))
        yield from _dense(width, 4 * width, width)
    yield from ((width,), (width,))


NAMED: dict[str, Callable[[], Iterator[Shape]]] = {
    "mlp": _mlp,
    "small": _small,
    "cnn": _cnn,
    "lstm": _lstm,
    "vgg16": _vgg16,
    "resnet50": _resnet50,
    "bert-base": _bert_base,
    "gpt2": _gpt2,
}


def tensors_of(text: str) -> Tensors:
    """What a line names: one of `NAMED`, shapes such as "1000x784,1000", or "module:function", which makes a PyTorch model.

    Raises:
        ValueError: it is none of these.
    """
    if text in NAMED:
        return [(f"{number}", shape) for number, shape in enumerate(NAMED[text]())]
    if ":" in text:
        return _of_a_model(*text.split(":", 1))
    try:
        shapes = [tuple(int(side) for side in shape.split("x")) for shape in text.split(",")]
    except ValueError:
        shapes = []
    if not shapes or any(side < 1 for shape in shapes for side in shape):
        raise ValueError(
            f"{text!r} is no model: give one of {', '.join(NAMED)}, or shapes such as 1000x784,1000, or module:function, which "
            "makes a PyTorch model"
        )
    return [(f"{number}", shape) for number, shape in enumerate(shapes)]


def _of_a_model(module: str, function: str) -> Tensors:
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(importlib.import_module(module), function)()
        return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters() if parameter.requires_grad]
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{module}:{function} makes no PyTorch model: {error}") from error
    finally:
        sys.path.pop(0)


def gradient(shapes: Iterable[Shape], batch: int, seed: int) -> NDArray[np.float32]:
    """Drawn gradients of tensors of these shapes, one after another: float32[elements].

    A matrix's is the sum of `batch` products of two vectors, as a dense layer's is: it has no higher rank.
    """
    rng = np.random.default_rng(seed)

    def drawn(shape: Shape) -> NDArray[np.float32]:
        if len(shape) != 2 or batch >= min(shape):
            return rng.standard_normal(math.prod(shape), dtype=np.float32)
        left, right = (rng.standard_normal((side, batch), dtype=np.float32) for side in shape)
        product: NDArray[np.float32] = left @ right.T / np.float32(math.sqrt(batch))
        return product.reshape(-1)

    return np.concatenate([drawn(shape) for shape in shapes])


def elements(tensors: Tensors) -> int:
    """Number of parameters."""
    return sum(math.prod(shape) for _, shape in tensors)
