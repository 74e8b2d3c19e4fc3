"""A training with each of the papers' methods that is saved in the middle, or goes on from there: each in a start of its own.

resume.py <framework> save|resume <directory>: writes each rank's weights, and says on which of them it is whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from hvdcompress import checkpoint

STEPS, SAVED_AT = 40, 20
METHODS = {
    "sketch": "sketch:ratio=0.3,exact_below=10",
    "atomo": "atomo:budget=0.3,unit=ratio,exchange=allgather",
    "dore": "dore:block=16,exchange=sharded",
    "topk": "topk:ratio=0.1,exchange=allgather",
}
SHAPES = [(20, 30), (30,), (30, 10)]


def data(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    x = rng.normal(size=(16, 20)).astype(np.float32)
    return x, np.sin(3 * x[:, :10]).astype(np.float32)


def initial() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape, scale=0.2).astype(np.float32) for shape in SHAPES]


def train_torch(text: str, directory: Path, goes_on: bool) -> list[np.ndarray]:
    import horovod.torch as hvd
    import torch

    import hvdcompress.torch as hvc

    weights = [torch.nn.Parameter(torch.from_numpy(w)) for w in initial()]
    names = [(f"w{i}", w) for i, w in enumerate(weights)]
    compression = hvc.Compression.parse(text, names, dense_below=100)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.02), named_parameters=names, compression=compression)
    if goes_on:
        assert checkpoint.restore(compression, directory, step=SAVED_AT)
        for weight, saved in zip(weights, np.load(directory / "weights.npz").values()):
            weight.data.copy_(torch.from_numpy(saved))
    for step in range(SAVED_AT if goes_on else 0, STEPS):
        if step == SAVED_AT and not goes_on:
            checkpoint.save(compression, directory, step=step)
            if hvd.rank() == 0:
                np.savez(directory / "weights.npz", *[w.detach().numpy() for w in weights])
        x, y = map(torch.from_numpy, data(hvd.rank(), step))
        optimizer.zero_grad()
        (torch.relu(x @ weights[0] + weights[1]) @ weights[2] - y).square().mean().backward()
        optimizer.step()
    return [w.detach().numpy() for w in weights]


def train_tensorflow(text: str, directory: Path, goes_on: bool) -> list[np.ndarray]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvdcompress.tensorflow as hvc

    weights = [tf.Variable(w, name=f"w{i}") for i, w in enumerate(initial())]
    compression = hvc.Compression.parse(text, dense_below=100)
    if goes_on:
        assert checkpoint.restore(compression, directory, step=SAVED_AT)
        for weight, saved in zip(weights, np.load(directory / "weights.npz").values()):
            weight.assign(saved)

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.relu(x @ weights[0] + weights[1]) @ weights[2] - y) ** 2)
        return hvc.DistributedGradientTape(tape, compression).gradient(loss, weights)

    for step in range(SAVED_AT if goes_on else 0, STEPS):
        if step == SAVED_AT and not goes_on:
            checkpoint.save(compression, directory, step=step)
            if hvd.rank() == 0:
                np.savez(directory / "weights.npz", *[w.numpy() for w in weights])
        for weight, gradient in zip(weights, gradients(*data(hvd.rank(), step))):
            weight.assign_sub(0.02 * gradient)
    return [w.numpy() for w in weights]


if __name__ == "__main__":
    framework, what, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if framework == "torch":
        import horovod.torch as hvd
        import torch

        torch.set_num_threads(1)
    else:
        import horovod.tensorflow as hvd
    hvd.init()
    for method, text in METHODS.items():
        train = {"torch": train_torch, "tensorflow": train_tensorflow}[framework]
        weights = train(text, directory / method, what == "resume")
        np.savez(directory / f"{what}-{method}-{hvd.rank()}-of-{hvd.size()}.npz", *weights)
