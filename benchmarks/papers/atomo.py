"""ATOMO's atoms against QSGD and TernGrad: variance for bytes, training with equal bytes, and how singular vectors are found.

    python benchmarks/papers/atomo.py                  everything, about 15 minutes of one core
    python benchmarks/papers/atomo.py --quick          fewer points and steps: half a minute, to see that it runs
    python benchmarks/papers/atomo.py --only variance  or training, or factors
    python benchmarks/papers/atomo.py --tune           how the learning rates of the training were chosen

The comparison is that of H. Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", 2018: of unbiased
codes with the same bytes the one with the least variance should train best. Networks and data are this project's: Fashion-MNIST,
the CNN of the examples and a small residual network for variances, a CNN without batch normalisation for training.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HVDCOMPRESS_NUM_THREADS"):
    os.environ[variable] = "1"

import matplotlib
import numpy as np
import torch
from nets import NETS, stages
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tasks import FashionMNIST, train
from variance import (
    ALIKE,
    QUANTISERS,
    RATIOS,
    RESHAPE_NOTES,
    VARIANCE_NOTES,
    figures_of,
    plot_variance,
    report_reshapes,
    report_variance,
    reshapes_of,
    right_aligned,
)
from workers import Bytes, Diverged, Ranks, dense_bytes, layout_of

from hvdcompress import make
from hvdcompress.codecs import Spectral
from hvdcompress.codecs.spectral import FACTORS, atoms_in, basis_of
from hvdcompress.core import Array

PARTS = ("variance", "training", "factors")
WORKERS, MOMENTUM, STEPS = 4, 0.9, 300
GRID = (0.00375, 0.0075, 0.015, 0.03, 0.06, 0.12, 0.24)  # of learning rates
EVERY = 50  # steps, between two looks at the accuracy
BYTES = 0.1  # of a tensor's, with which spectral atoms and entries are compared tensor by tensor
MATRICES = ((64, 576), (128, 1152), (784, 128), (4608, 18), (512, 4608))
TRAINING_NOTES = (
    f"SGD with momentum {MOMENTUM:g}, warm-up and linear decay, 256 images a step of all {WORKERS} ranks together; each method "
    "has its best rate of one grid on the validation split, of one seed. Bytes are counted, of a rank and step: ring: sent by a "
    "rank as codes are gathered, with headers and status records; server: up and down through a parameter server, payloads up "
    "and a dense mean down. Budgets and blocks are chosen for 10x in the ring; TernGrad's bytes are what they are. variance: "
    "E||Q(g) - g||^2 / ||g||^2 of a rank's gradient, median over the steps (clipped: without what clipping cuts off)."
)
FACTORS_NOTES = (
    "ms: to find all atoms of a matrix; encode: of Spectral(budget=3), drawing and packing included; medians, quartiles in "
    "brackets, of {runs} runs, one thread. error: ||sum of the atoms - X|| / ||X||. variance: of 3 atoms expected, over that "
    "by svd. Singular values of X fall as 1 / i."
)


@dataclass(frozen=True)
class Method:
    """`lr` is the best of `GRID` on the validation split, by --tune."""

    title: str
    text: str  # of the registry
    lr: float
    color: str
    style: str = "-"


ATOMO = "atomo:budget=0.05,unit=ratio,exchange=allgather,atoms="
METHODS = (
    Method("dense", "dense", 0.12, "black"),
    Method("ATOMO, entries", ATOMO + "entrywise", 0.12, "tab:red"),
    Method("ATOMO, spectral, floats", ATOMO + "spectral,values=float32", 0.015, "tab:blue"),
    Method("ATOMO, spectral, halves", ATOMO + "spectral", 0.12, "tab:blue", "--"),
    Method("ATOMO, Fourier", ATOMO + "fourier", 0.12, "tab:green"),
    Method("QSGD, 1 level, l2", "qsgd:levels=1,block=64,exchange=allgather", 0.06, "tab:orange"),
    Method("QSGD, 1 level, max", "qsgd:levels=1,block=96,norm=max,exchange=allgather", 0.12, "tab:orange", "--"),
    Method("TernGrad", "terngrad", 0.06, "tab:purple"),
    Method("TernGrad, clipped", "terngrad:clip=2.5", 0.06, "tab:purple", "--"),
)


class Watched(FashionMNIST):
    """Keeps the losses, and the accuracy after every `EVERY` steps."""

    def __init__(self, seed: int, tuning: bool):
        super().__init__(seed, tuning)
        self.losses: list[float] = []
        self.scores: list[float] = []

    def gradients(self, workers: int) -> tuple[Array, float]:
        if self.losses and len(self.losses) % EVERY == 0:
            self.scores.append(self.score())
        grads, loss = super().gradients(workers)
        self.losses.append(loss)
        return grads, loss


class Counted(Ranks):
    """Keeps the bytes of each step, and how large the error of a rank's code was."""

    def __init__(self, *args: object):
        super().__init__(*args)
        self.sent: list[Bytes] = []
        self.noise: list[float] = []

    def mean(self, grads: Array) -> Array:
        mean = super().mean(grads)
        self.sent.append(self.bytes())
        self.noise.append(self.simulation.sessions[0].stats().metrics.get("uplink_noise", 0.0))
        return mean


@dataclass
class Run:
    """One training; the accuracies are NaN where it diverged."""

    accuracies: list[float]  # percent, after every `EVERY` steps and at the end
    losses: list[float]
    bytes: Bytes  # of a step, the mean; the first one's have the handshake in them
    noise: float  # median


@dataclass
class Results:
    """Trainings of one method and rate."""

    method: Method
    lr: float
    runs: list[Run] = field(default_factory=list)

    @property
    def final(self) -> list[float]:
        return [run.accuracies[-1] for run in self.runs]

    @property
    def bytes(self) -> Bytes:
        return Bytes(*np.mean([run.bytes for run in self.runs], axis=0))

    def shown(self) -> tuple[str, str]:
        """Median and range of the accuracy."""
        if np.isnan(self.final).any():
            return "diverged", f"{np.isnan(self.final).sum()} of {len(self.final)}"
        return f"{np.median(self.final):.2f}", f"{min(self.final):.2f} to {max(self.final):.2f}"


class Job(NamedTuple):
    method: Method
    lr: float
    seed: int


def run(job: Job, steps: int, tuning: bool, tick: Callable[[], None]) -> Run:
    task = Watched(job.seed, tuning)
    exchange = Counted(make(job.method.text), layout_of(task.parameters), WORKERS, job.seed)
    try:
        train(task, exchange, job.lr, MOMENTUM, steps, tick)
        final = task.score()
    except Diverged:
        final = float("nan")
    return Run([*task.scores, final], task.losses, Bytes(*np.mean(exchange.sent[1:], axis=0)), float(np.median(exchange.noise)))


def run_all(jobs: list[Job], steps: int, tuning: bool, console: Console) -> list[Results]:
    results: dict[tuple[str, float], Results] = {}
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as progress:
        shown, done = progress.add_task("", total=steps * len(jobs)), 0
        for job in jobs:
            label, began = f"{job.method.title}, lr {job.lr:g}, seed {job.seed}", time.perf_counter()
            progress.update(shown, description=label)
            result = run(job, steps, tuning, lambda: progress.advance(shown))
            done += steps
            progress.update(shown, completed=done)
            results.setdefault((job.method.title, job.lr), Results(job.method, job.lr)).runs.append(result)
            if not console.is_terminal:
                console.print(f"{label}: {result.accuracies[-1]:.2f} in {time.perf_counter() - began:.0f} s")
    return list(results.values())


def compare_training(seeds: int, steps: int, output: Path, console: Console) -> None:
    jobs = [Job(method, method.lr, seed) for method in METHODS for seed in range(seeds)]
    results, layout = run_all(jobs, steps, False, console), layout_of(FashionMNIST(0).parameters)
    dense = dense_bytes(layout, WORKERS)
    table = right_aligned(
        f"Fashion-MNIST: {layout.size:,} parameters, {WORKERS} ranks, {steps} steps, {seeds} seed{'s' * (seeds > 1)}",
        ["method", "lr", "test accuracy (%)", "range", "loss", "variance", "ring", "compression", "server", "compression"],
    )
    for one in results:
        losses = [np.mean(run.losses[-EVERY:]) for run in one.runs]
        table.add_row(
            one.method.title,
            f"{one.lr:g}",
            *one.shown(),
            f"{np.median(losses):.3f}",
            f"{np.median([run.noise for run in one.runs]):.3g}",
            f"{one.bytes.ring:,.0f}",
            f"{dense.ring / one.bytes.ring:.3g}x",
            f"{one.bytes.paper:,.0f}",
            f"{dense.paper / one.bytes.paper:.3g}x",
        )
    console.print(table)
    console.print(f"{TRAINING_NOTES} loss: mean of the last {EVERY} steps.", highlight=False)
    plot_training(results, dense, steps, output / "atomo_training.png")
    console.print(f"curves: {output / 'atomo_training.png'}")


def plot_training(results: Iterable[Results], dense: Bytes, steps: int, path: Path) -> None:
    """Loss and accuracy against steps: medians over seeds, and ranges."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    window = max(1, steps // 20)
    looks = [*range(EVERY, steps, EVERY), steps]
    for one in results:
        if np.isnan(one.final).any():
            continue
        label = f"{one.method.title}, {dense.ring / one.bytes.ring:.3g}x"
        style = {"color": one.method.color, "linestyle": one.method.style, "label": label}
        losses = np.median([np.convolve(run.losses, np.ones(window) / window, "valid") for run in one.runs], axis=0)
        left.plot(np.arange(len(losses)) + window, losses, **style)
        accuracies = np.array([run.accuracies for run in one.runs])
        middle = np.median(accuracies, axis=0)
        right.errorbar(
            looks, middle, yerr=[middle - accuracies.min(0), accuracies.max(0) - middle], marker=".", capsize=2, **style
        )
    left.set(xlabel="step", ylabel=f"training loss, mean over {window} steps", yscale="log")
    right.set(xlabel="step", ylabel="test accuracy (%), median and range")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(
        fontsize=8, loc="lower right", handlelength=4, title="dense bytes over the method's, in the ring", title_fontsize=8
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def tune(steps: int, console: Console) -> None:
    results = run_all([Job(method, lr, 0) for method in METHODS for lr in GRID], steps, True, console)
    table = right_aligned(
        f"validation accuracy (%), {steps} steps, seed 0; the best rate of each method is marked", ["method", *map(str, GRID)]
    )
    for method in METHODS:
        own = [one.final[0] for one in results if one.method is method]
        table.add_row(
            method.title, *(f"[bold]{value:.2f}[/bold]" if value == np.nanmax(own) else f"{value:.2f}" for value in own)
        )
    console.print(table)


def compare_variances(quick: bool, output: Path, console: Console) -> None:
    batches, draws, steps = (1, 1, 30) if quick else (5, 4, None)
    ratios, quantisers = (RATIOS[2::2], QUANTISERS[::5]) if quick else (RATIOS, QUANTISERS)
    results = []
    for net in NETS:
        for stage in stages(net, batches, steps):
            figures = figures_of(stage, ratios, draws, quantisers)
            report_variance(figures, ratios, console)
            report_reshapes(stage, reshapes_of(stage, BYTES), BYTES, console)
            results.append(figures)
    console.print(VARIANCE_NOTES, highlight=False)
    console.print(RESHAPE_NOTES.format(bytes=BYTES, alike=ALIKE), highlight=False)
    plot_variance(results, output / "atomo_variance.png")
    console.print(f"curves: {output / 'atomo_variance.png'}")


def compare_factors(quick: bool, console: Console) -> None:
    runs = 3 if quick else 9
    names = ["X", "factors", "ms", "encode, ms", "error", "variance"]
    table = right_aligned("atoms by the Gram matrix's eigenvectors, and by LAPACK's SVD", names)
    for m, n in MATRICES[:-1] if quick else MATRICES:
        x, milliseconds = falling(m, n), {}
        least = Spectral(budget=3, factors="svd").encode(x, 0).noise
        for factors in FACTORS:
            codec = Spectral(budget=3, factors=factors)
            found = quartiles(partial(all_atoms, x, factors), runs)
            encoded = quartiles(partial(codec.encode, x, 0), runs)
            u, sigmas, v = all_atoms(x, factors)
            error = np.linalg.norm((u.T * sigmas).astype(np.float64) @ v - x) / np.linalg.norm(x)
            cells = (f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in (found, encoded))
            table.add_row(f"{m} x {n}", factors, *cells, f"{error:.1e}", f"{codec.encode(x, 0).noise / least:.5f}")
            milliseconds[factors] = found[1]
        table.add_row("", "svd / gram", f"{milliseconds['svd'] / milliseconds['gram']:.1f}", end_section=True)
    console.print(table)
    console.print(FACTORS_NOTES.format(runs=runs), highlight=False)


def all_atoms(x: Array, factors: str) -> tuple[Array, Array, Array]:
    """float32[k, m], float32[k], float32[k, n]: unit vectors, singular values, unit vectors of float32[m, n]."""
    return atoms_in(x, basis_of(x, factors))


def falling(m: int, n: int) -> Array:
    """float32[m, n] with random singular vectors and singular values 1 / i."""
    rng, least = np.random.default_rng(0), min(m, n)
    u, v = (np.linalg.qr(rng.normal(size=(size, least)))[0] for size in (m, n))
    return ((u / np.arange(1, least + 1)) @ v.T).astype(np.float32)


def quartiles(call: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """Milliseconds; one run before them is not counted."""
    call()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps; one batch, two budgets; no large matrix")
    parser.add_argument("--tune", action="store_true", help="try the grid of learning rates on the validation split instead")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("papers-out"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    console = Console()
    console = console if console.is_terminal else Console(width=180)
    began, seeds, steps = time.perf_counter(), 1 if args.quick else args.seeds, 20 if args.quick else STEPS
    args.output.mkdir(parents=True, exist_ok=True)
    if args.tune:
        tune(steps, console)
    elif args.quick:
        console.print("quick: too few steps and batches to conclude anything from")
    for part in (args.only,) if args.only else PARTS:
        if args.tune:
            break
        if part == "variance":
            compare_variances(args.quick, args.output, console)
        elif part == "training":
            compare_training(seeds, steps, args.output, console)
        else:
            compare_factors(args.quick, console)
    console.print(f"{(time.perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
