"""What each rank of benchmarks/training.py runs: trainings by several methods, a few steps of each in turn.

mpirun -np 2 python benchmarks/training_job.py steps --model mlp --methods none fp16 dore --output steps.json
mpirun -np 2 python benchmarks/training_job.py accuracy --methods none dore --output accuracy.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
for folder in ("../examples", "papers", "netlab"):
    sys.path.insert(0, str(Path(__file__).resolve().parent / folder))

import datasets
import numpy as np
import wire

from hvdcompress.command.bench import Ranks

BATCH = 64  # images a rank, or sequences
WORDS = 20  # of a sequence
VOCABULARY = 10_000
COMPUTE = "compute"  # in place of a method: every rank trains by itself
BLOCK_SECONDS = 1.0  # so long the steps of one method take before it is another's turn, at least
MOST_STEPS = 20  # of a turn
EVALUATE = 20  # steps between two looks at the test images

Step = Callable[[], None]


class Job(NamedTuple):
    """One method's training."""

    step: Step
    stats: Callable[[], Any]  # of the compressor; None for Horovod's own


def images(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    train = datasets.load().train
    return train.x[rank::size], train.y[rank::size]


def sentences(rank: int, size: int) -> np.ndarray:
    """int64[sentences, WORDS + 1]; every rank reads the corpus, which is fetched once."""
    import corpus

    words = corpus.load(VOCABULARY).train
    rows = words[: len(words) // (WORDS + 1) * (WORDS + 1)].reshape(-1, WORDS + 1)
    return rows[rank::size]


def fetch(models: Sequence[str]) -> None:
    """Brings what the ranks will read onto this machine: from a lab's hosts nothing else is reached."""
    for load in {sentences if model == "lstm" else images for model in models}:
        load(0, 1)


# PyTorch


class PyTorch(Ranks):
    """The trainings with horovod.torch."""

    def __init__(self, model: str):
        super().__init__()
        self.name, from_numpy = model, self.torch.from_numpy
        if model == "lstm":
            rows = from_numpy(sentences(self.rank, self.size))
            self.inputs, self.targets = rows[:, :-1], rows[:, 1:]
        else:
            self.inputs, self.targets = map(from_numpy, images(self.rank, self.size))

    def model(self) -> Any:
        from torch import nn

        self.torch.manual_seed(0)
        if self.name == "cnn":
            from pytorch_fashion_mnist import CNN

            return CNN()
        if self.name == "lstm":
            return _torch_lstm()
        layers: list[Any] = [nn.Flatten()]
        for inputs, outputs in zip(WIDTHS[self.name], WIDTHS[self.name][1:]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def wrapped(self, model: Any, spec: str, lr: float, momentum: float) -> tuple[Any, Any]:
        import hvdcompress.torch as hvc

        optimizer = self.torch.optim.SGD(model.parameters(), lr, momentum)
        if spec == COMPUTE:
            return optimizer, None
        compression = hvc.Compression.parse(spec, model)
        # Each method has names of its own.
        named = [(f"{spec}.{name}", parameter) for name, parameter in model.named_parameters()]
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression), compression

    def job(self, spec: str, lr: float = 0.01, momentum: float = 0.0) -> Job:
        model = self.model()
        optimizer, compression = self.wrapped(model, spec, lr, momentum)
        loss, place = self.torch.nn.functional.cross_entropy, [0]

        def step() -> None:
            start = place[0] = (place[0] + BATCH) % (len(self.targets) - BATCH)
            x, y = self.inputs[start : start + BATCH], self.targets[start : start + BATCH]
            optimizer.zero_grad()
            loss(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()

        return Job(step, getattr(compression, "stats", lambda: None))


def _torch_lstm() -> Any:
    import torch
    from torch import nn

    class LSTM(nn.Module):
        """An embedding, two layers of 200 cells, and words: 4.7M parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
            self.words = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words(self.cells(self.embedding(x))[0])

    return LSTM()


WIDTH = 200
WIDTHS = {"mlp": (784, 1500, 1500, 1500, 10), "small": (784, 512, 512, 10)}


# Keras


class Keras:
    """The trainings with horovod.tensorflow.keras, one compiled step after the other."""

    def __init__(self, model: str):
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self.hvd, self.tf, self.name = hvd, tf, model
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        if model == "lstm":
            rows = sentences(rank, size)
            self.inputs, self.targets = rows[:, :-1], rows[:, 1:]
        else:
            x, self.targets = images(rank, size)
            self.inputs = np.moveaxis(x, 1, -1)

    def model(self) -> Any:
        keras = self.tf.keras
        keras.utils.set_random_seed(0)
        layers = keras.layers
        if self.name == "cnn":
            from keras_fashion_mnist import cnn

            return cnn()
        if self.name == "lstm":
            cells = [layers.LSTM(WIDTH, return_sequences=True) for _ in range(2)]
            words = layers.Dense(VOCABULARY)
            return keras.Sequential([keras.Input((WORDS,)), layers.Embedding(VOCABULARY, WIDTH), *cells, words])
        _, *hidden, last = WIDTHS[self.name]
        dense = [layers.Dense(width, "relu") for width in hidden]
        return keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), *dense, layers.Dense(last)])

    def job(self, spec: str, lr: float = 0.01) -> Job:
        import hvdcompress.tensorflow as hvc

        keras = self.tf.keras
        optimizer, compression = keras.optimizers.SGD(lr), None
        if spec != COMPUTE:
            compression = hvc.Compression.parse(spec)
            optimizer = hvc.DistributedOptimizer(optimizer, compression, sparse_as_dense=True)
        model, place = self.model(), [0]
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

        def step() -> None:
            start = place[0] = (place[0] + BATCH) % (len(self.targets) - BATCH)
            model.train_on_batch(self.inputs[start : start + BATCH], self.targets[start : start + BATCH])

        return Job(step, getattr(compression, "stats", lambda: None))

    def mean(self, value: float) -> float:
        return float(self.hvd.allreduce(self.tf.constant(value, self.tf.float64), name="mean"))


FRAMEWORKS = {"pytorch": PyTorch, "keras": Keras}
MODELS = {"mlp": "MLP, 5.7M parameters", "small": "MLP, 0.7M parameters", "cnn": "CNN, 0.2M", "lstm": "LSTM language model, 4.7M"}


def sent(nic: str | None) -> int:
    """Bytes on this host's wire; 0 where there is none to look at."""
    return wire.sent(nic) if nic else 0


def steps(framework: Any, methods: list[str], rounds: int, nic: str | None) -> dict[str, Any]:
    """Seconds and bytes of a step, of each method, in `rounds` turns; the mean over ranks of both.

    What Horovod's ranks say to each other all the time is not the methods': the bytes that are sent while every rank trains by
    itself are taken off, by the second.
    """
    jobs, turns = {}, {}
    for spec in [COMPUTE, *methods]:
        job = framework.job(spec)
        job.step()
        began = time.perf_counter()
        job.step()
        seconds = framework.mean(time.perf_counter() - began)
        jobs[spec], turns[spec] = job, max(1, min(MOST_STEPS, math.ceil(BLOCK_SECONDS / seconds)))
    figures: dict[str, Any] = {spec: {"seconds": [], "bytes": [], "raw_bytes": [], "steps": turns[spec]} for spec in jobs}
    chatter = 0.0  # bytes a second
    for _ in range(rounds):
        for spec, job in jobs.items():
            framework.mean(0.0)  # all begin together
            before, began = sent(nic), time.perf_counter()
            for _ in range(turns[spec]):
                job.step()
            own = time.perf_counter() - began
            took = framework.mean(own)
            on_wire, elapsed = float(sent(nic) - before), time.perf_counter() - began
            if spec == COMPUTE:
                chatter = framework.mean(on_wire / elapsed)
            figures[spec]["seconds"].append(took / turns[spec])
            figures[spec]["raw_bytes"].append(framework.mean(on_wire) / turns[spec])
            figures[spec]["bytes"].append(framework.mean(on_wire - chatter * elapsed) / turns[spec])
    for spec, job in jobs.items():
        stats = job.stats()
        if stats is not None:
            parts = {name: seconds / stats.counted for name, seconds in stats.seconds.items()}
            figures[spec] |= {"counted": stats.last.wire, "dense": stats.last.dense, "parts": parts, "noise": stats.metrics}
    found = {"chatter": chatter, "methods": figures}
    if isinstance(framework, PyTorch):  # for `hvdcompress plan`
        found["network"] = vars(framework.network())
        found["tensors"] = [(name, tuple(parameter.shape)) for name, parameter in framework.model().named_parameters()]
    return found


def accuracy(framework: PyTorch, spec: str, lr: float, momentum: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains until a share of unseen images is classified rightly; the clock stands while they are looked at."""
    torch, hvd = framework.torch, framework.hvd
    splits = datasets.load()
    if args.unseen == "test":
        train, unseen = datasets.join(splits.train, splits.validation), splits.test
    else:
        train, unseen = splits.train, splits.validation
    x, y = torch.from_numpy(train.x), torch.from_numpy(train.y)
    own = slice(hvd.rank(), None, hvd.size())
    unseen_x, unseen_y = torch.from_numpy(unseen.x[own]), torch.from_numpy(unseen.y[own])
    model = framework.model()
    torch.manual_seed(seed)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimizer, _ = framework.wrapped(model, spec, lr, momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    shuffle, seconds, curve, done = torch.Generator().manual_seed(seed), 0.0, [], 0
    while done < args.most:
        order = torch.randperm(len(y), generator=shuffle)[own]
        for batch in order.split(BATCH):
            if len(batch) < BATCH or done == args.most:
                break
            began = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            seconds += time.perf_counter() - began
            done += 1
            if done % EVALUATE == 0:
                with torch.no_grad():
                    right = framework.mean(float((model(unseen_x).argmax(1) == unseen_y).double().mean()))
                curve.append((framework.mean(seconds), right))
                if right >= args.target:
                    return {"steps": done, "seconds": curve[-1][0], "curve": curve}
    return {"steps": None, "seconds": None, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "accuracy"])
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="pytorch")
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--methods", nargs="+", required=True, help="as Compression.parse takes them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.05], help="accuracy: of each method")
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.9], help="accuracy: of each method's optimizer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="accuracy: a training of each method by each")
    parser.add_argument(
        "--unseen", choices=["test", "validation"], default="test", help="accuracy: whose, in the choice of rates validation"
    )
    parser.add_argument("--target", type=float, default=0.88, help="accuracy: share of those images")
    parser.add_argument("--most", type=int, default=2000, help="accuracy: steps of a training at most")
    parser.add_argument("--nic", default=None, help="whose bytes are counted; lab0 in the lab")
    parser.add_argument("--output", type=Path, required=True, help="a file, for JSON")
    args = parser.parse_args()
    framework = FRAMEWORKS[args.framework](args.model)
    if args.what == "steps":
        result: Any = steps(framework, args.methods, args.rounds, args.nic)
    else:
        result = {spec: [] for spec in args.methods}
        for seed in args.seeds:
            for spec, lr, momentum in zip(args.methods, args.lr, args.momentum, strict=True):
                run = accuracy(framework, spec, lr, momentum, seed, args)
                result[spec].append({"lr": lr, "momentum": momentum, "seed": seed, **run})
                if framework.hvd.rank() == 0:
                    print(f"{spec}, lr {lr:g}, seed {seed}: {run['steps']} steps, {run['seconds']} s", flush=True)
    if framework.hvd.rank() == 0:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
