"""Trains a small CNN dense, with fp16 and with compression, and says what came of it. Started by ci/demo.

    mpirun -np 2 python examples/demo.py            three seeds of each method on Fashion-MNIST
    mpirun -np 2 python examples/demo.py --quick    one seed, a part of an epoch
    mpirun -np 2 python examples/demo.py --grid     how the learning rates were chosen, on the validation split
    mpirun -np 2 python examples/demo.py --keras    the same with Keras, and TensorBoard's files

Every method has its own best learning rate from the same grid. The bytes are what a rank sends in a step by a ring or a
pairwise exchange: counted from what the collectives were given, with tokens, status records and small dense tensors; and
as the formulas say.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import datasets
import matplotlib
import numpy as np
from demo_methods import BATCH, METHODS, SHOWN, Run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def report(results: dict[str, list[Run]], lrs: dict[str, float], ranks: int, console: Console) -> None:
    seeds = len(next(iter(results.values())))
    table = Table(title=f"{ranks} ranks, {seeds} seeds; medians over steps, bytes of a rank and step")
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
    parser.add_argument("--grid", action="store_true", help="try the grid of learning rates on the validation split instead")
    parser.add_argument("--keras", action="store_true", help="train with Keras, not PyTorch")
    parser.add_argument("--only", default="", help="of all methods, those whose name has this in it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("demo-out"))
    args = parser.parse_args()

    framework = "keras" if args.keras else "pytorch"
    trainer = importlib.import_module(f"demo_{framework}")
    hvd = trainer.hvd
    hvd.init()
    terminal = os.environ.get("DEMO_TERMINAL") == "1"
    console = Console(force_terminal=terminal, quiet=hvd.rank() != 0, width=None if terminal else 160)
    splits = datasets.load(args.data)
    max_steps = 400 if args.quick else None
    epochs, seeds = (1, 1) if args.quick else (args.epochs, args.seeds)
    methods = [m for m in METHODS if args.only.lower() in m.name.lower()] if args.only else SHOWN[framework]
    if args.grid:
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
            run = trainer.train(
                method, lr, seed, epochs, max_steps, (images, tested), lambda: progress.advance(task), args.output
            )
            results.setdefault(label, []).append(run)
            if not terminal:
                console.print(f"{label}, seed {seed}: {run.accuracies[-1]:.2%}")
    if hvd.rank() == 0:
        report(results, {label: lr for label, _, lr, _ in jobs}, hvd.size(), console)
        args.output.mkdir(parents=True, exist_ok=True)
        plot(results, args.output / "curves.png")
        (args.output / "runs.json").write_text(
            json.dumps({label: [asdict(run) for run in runs] for label, runs in results.items()}, default=float)
        )
        console.print(f"curves and figures: {args.output}/curves.png, runs.json")


if __name__ == "__main__":
    main()
