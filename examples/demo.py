"""Trains a small CNN dense, with fp16 and with compression, and says what came of it. Started by ci/demo.

    mpirun -np 2 python examples/demo.py            three seeds of each method on Fashion-MNIST
    mpirun -np 2 python examples/demo.py --quick    one seed, a part of an epoch
    mpirun -np 2 python examples/demo.py --tune     how the learning rates were chosen, on the validation split

Every method has its own best learning rate from the same grid. The bytes are what a rank sends in a step by a ring or a
pairwise exchange: counted from what the collectives were given, with tokens, status records and small dense tensors; and
as the formulas say.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import horovod.torch as hvd
import matplotlib
import numpy as np
import torch
from pytorch_fashion_mnist import CNN, accuracy
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.nn import functional

import hvdcompress.torch as hvc
from hvdcompress import traffic

BATCH = 32  # of each rank
WARM_UP = 50  # steps
GRID = (0.00625, 0.0125, 0.025, 0.05, 0.1)  # of learning rates, with momentum
GRID_WITHOUT_MOMENTUM = (0.05, 0.1, 0.2, 0.4)


class Counted:
    """One of Horovod's own compressors, with its bytes counted."""

    def __init__(self, compression: Any):
        self.compression, self.sent = compression, traffic.Traffic()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compressed, context = self.compression.compress(tensor)
        self.sent += traffic.allreduced(compressed.numel() * compressed.element_size(), hvd.size())
        self.sent += traffic.dense(tensor.numel() * tensor.element_size(), hvd.size())
        return compressed, context

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return self.compression.decompress(tensor, context)


@dataclass(frozen=True)
class Method:
    name: str
    compression: Callable[[torch.nn.Module], Any]
    lr: float  # the best of its grid on the validation split, by --tune
    momentum: float = 0.9  # of the optimizer
    bytes_per_element: int = 4  # what the formula of a plain allreduce goes by

    @property
    def grid(self) -> tuple[float, ...]:
        return GRID if self.momentum else GRID_WITHOUT_MOMENTUM


METHODS = [
    Method("dense", lambda model: Counted(hvc.Compression.none), lr=0.05),
    Method("fp16", lambda model: Counted(hvc.Compression.fp16), lr=0.05, bytes_per_element=2),
    Method("DORE, block 64", lambda model: hvc.Compression.dore(model, block=64, scales="byte"), lr=0.025),
    # Masking throws momentum away at this compression: without it, and with a larger rate, the sketch does better.
    Method("Sketched-SGD", lambda model: hvc.Compression.sketch(model, ratio=0.096, momentum=0), lr=0.2, momentum=0),
]


@dataclass
class Run:
    """What one training came to."""

    accuracies: list[float] = field(default_factory=list)  # after each epoch
    losses: list[float] = field(default_factory=list)  # of each step
    seconds: list[float] = field(default_factory=list)  # of each step
    counted: float = 0.0  # bytes a step and rank
    formula: float = 0.0
    dense: float = 0.0
    paper: float | None = None  # share of the dense bytes by the method's own accounting
    parts: dict[str, float] = field(default_factory=dict)  # seconds a step to encode, wait and decode
    noise: float | None = None  # of both compressions, relative to ||gradient||^2


def train(method: Method, lr: float, seed: int, epochs: int, max_steps: int | None, splits: Any, tick: Callable[[], None]) -> Run:
    images, tested = splits
    torch.manual_seed(seed)
    model = CNN(side=images.x.shape[-1])
    compression = method.compression(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=method.momentum),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, y = torch.from_numpy(images.x), torch.from_numpy(images.y)
    per_rank = len(y) // hvd.size()
    epoch_steps = min(per_rank // BATCH, max_steps or per_rank)
    total, shuffle, run = epochs * epoch_steps, torch.Generator().manual_seed(seed), Run()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, (total - step) / total))
    elements = sum(p.numel() for p in model.parameters())
    for _ in range(epochs):
        own = torch.randperm(len(y), generator=shuffle)[hvd.rank() :: hvd.size()]
        for batch in own.split(BATCH)[:epoch_steps]:
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            run.seconds.append(time.perf_counter() - began)
            schedule.step()
            run.losses.append(loss.item())
            if isinstance(compression, hvc.Compressor):
                run.formula += compression.predicted_bytes() / total
            tick()
        run.accuracies.append(accuracy(model, tested))
    if isinstance(compression, Counted):
        sent = compression.sent
        run.formula = 2 * (hvd.size() - 1) / hvd.size() * elements * method.bytes_per_element
    else:
        stats = compression.stats()
        sent, run.paper = stats.total, stats.total.paper_ratio
        run.parts = {name: seconds / total for name, seconds in stats.seconds.items()}
        noises = [value for name, value in stats.metrics.items() if name.endswith("noise")]
        run.noise = sum(noises) if noises else None
    run.counted, run.dense = sent.wire / total, sent.dense / total
    return run


def report(results: dict[str, list[Run]], lrs: dict[str, float], console: Console) -> None:
    table = Table(
        title=f"{hvd.size()} ranks, {len(next(iter(results.values())))} seeds; medians over steps, bytes of a rank and step"
    )
    for name in (
        "method",
        "lr",
        "test accuracy",
        "spread",
        "bytes counted",
        "by formula",
        "reduction",
        "as papers count",
        "noise",
        "ms a step",
        "encode + wait + decode",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, runs in results.items():
        final = [100 * run.accuracies[-1] for run in runs]
        counted, formula, dense = (np.mean([getattr(run, key) for run in runs]) for key in ("counted", "formula", "dense"))
        noise = f"{np.mean([run.noise for run in runs]):.2f}" if runs[0].noise is not None else ""
        table.add_row(
            name,
            f"{lrs[name]:g}",
            f"{np.mean(final):.2f} %",
            f"{min(final):.2f} to {max(final):.2f}",
            f"{counted:,.0f}",
            f"{formula:,.0f}",
            f"{1 - counted / dense:.1%}",
            f"{1 - np.mean([run.paper for run in runs]):.1%}" if runs[0].paper is not None else "",
            noise,
            f"{1e3 * np.median(np.concatenate([run.seconds for run in runs])):.1f}",
            " + ".join(f"{1e3 * np.mean([run.parts[part] for run in runs]):.1f}" for part in runs[0].parts),
        )
    console.print(table)
    console.print(
        "noise: expected squared error of what is compressed, relative to the gradient's squared norm, in the last step. "
        "The bytes counted include the handshake of the first step. As papers count: up and down through a parameter server, "
        "against float32 both ways."
    )


def plot(results: dict[str, list[Run]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, runs in results.items():
        losses = np.mean([run.losses for run in runs], axis=0)
        window = max(1, len(losses) // 100)
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        left.plot(np.arange(len(smooth)) + window, smooth, label=name)
        accuracies = 100 * np.array([run.accuracies for run in runs])
        steps = len(losses) / accuracies.shape[1] * np.arange(1, accuracies.shape[1] + 1)
        sent = steps * np.mean([run.counted for run in runs]) / 1e6
        spread = [accuracies.mean(0) - accuracies.min(0), accuracies.max(0) - accuracies.mean(0)]
        right.errorbar(sent, accuracies.mean(0), yerr=spread, marker="o", capsize=3, label=name)
    left.set(xlabel="step", ylabel="training loss, running mean", yscale="log")
    right.set(xlabel="MB sent by a rank", ylabel="test accuracy (%), mean and range", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["fashion-mnist", "digits"], default="fashion-mnist")
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch of at most 400 steps")
    parser.add_argument("--tune", action="store_true", help="try the grid of learning rates on the validation split instead")
    parser.add_argument("--only", default="", help="methods whose name has this in it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("demo-out"))
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    terminal = os.environ.get("DEMO_TERMINAL") == "1"
    console = Console(force_terminal=terminal, quiet=hvd.rank() != 0, width=None if terminal else 160)
    splits = datasets.load(args.data)
    max_steps = 400 if args.quick else None
    epochs, seeds = (1, 1) if args.quick else (args.epochs, args.seeds)
    methods = [m for m in METHODS if args.only.lower() in m.name.lower()]
    if args.tune:
        # Rates are chosen where the test images are not looked at.
        jobs = [(f"{m.name}, lr {lr:g}", m, lr, 0) for m in methods for lr in m.grid]
        images, tested = splits.train, splits.validation
    else:
        jobs = [(m.name, m, m.lr, seed) for m in methods for seed in range(seeds)]
        images, tested = datasets.join(splits.train, splits.validation), splits.test

    results: dict[str, list[Run]] = {}
    steps = epochs * min(len(images.y) // hvd.size() // BATCH, max_steps or len(images.y))
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task("", total=steps * len(jobs))
        for label, method, lr, seed in jobs:
            progress.update(task, description=f"{label}, seed {seed}")
            run = train(method, lr, seed, epochs, max_steps, (images, tested), lambda: progress.advance(task))
            results.setdefault(label, []).append(run)
            if not terminal:
                console.print(f"{label}, seed {seed}: {run.accuracies[-1]:.2%}")
    if hvd.rank() == 0:
        report(results, {label: lr for label, _, lr, _ in jobs}, console)
        args.output.mkdir(parents=True, exist_ok=True)
        plot(results, args.output / "curves.png")
        console.print(f"curves: {args.output / 'curves.png'}")


if __name__ == "__main__":
    main()
