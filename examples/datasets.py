"""Images to train on: Fashion-MNIST from Debian's package, or scikit-learn's digits where that is not to be had."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # apt-get install dataset-fashion-mnist


class Images(NamedTuple):
    x: NDArray[np.float32]  # (n, 1, height, width), standardised
    y: NDArray[np.int64]  # (n,), from 0 to 9


class Splits(NamedTuple):
    train: Images
    validation: Images  # the end of what is there for training; for choosing options, never trained on when they are
    test: Images


def load(name: str = "fashion-mnist") -> Splits:
    """Loads "fashion-mnist" (50,000 + 10,000 + 10,000 of 28 x 28) or "digits" (1,200 + 200 + 397 of 8 x 8)."""
    if name == "digits":
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return _split(pixels.reshape(-1, 8, 8), labels, sizes=(1200, 200, 397))
    if name != "fashion-mnist":
        raise ValueError(f"there is no data set {name!r}; there are 'fashion-mnist' and 'digits'")
    if not FASHION_MNIST.is_dir():
        raise FileNotFoundError(f"{FASHION_MNIST} is not there: apt-get install dataset-fashion-mnist, or use --data digits")
    parts = [(_idx(f"{part}-images-idx3-ubyte.gz"), _idx(f"{part}-labels-idx1-ubyte.gz")) for part in ("train", "t10k")]
    return _split(*(np.concatenate(arrays) for arrays in zip(*parts)), sizes=(50_000, 10_000, 10_000))


def join(first: Images, second: Images) -> Images:
    return Images(np.concatenate([first.x, second.x]), np.concatenate([first.y, second.y]))


def _idx(name: str) -> NDArray[np.uint8]:
    content = gzip.decompress((FASHION_MNIST / name).read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _split(pixels: NDArray[np.generic], labels: NDArray[np.generic], sizes: tuple[int, int, int]) -> Splits:
    x = pixels.astype(np.float32)[:, None]
    seen = x[: sizes[0]]
    x = (x - seen.mean()) / seen.std()
    stops = np.cumsum(sizes)
    return Splits(*(Images(x[stop - n : stop], labels[stop - n : stop].astype(np.int64)) for n, stop in zip(sizes, stops)))
