"""Sketched-SGD against dense, local top-k and true top-k, simulated: quality against compression, and against workers.

    python benchmarks/papers/sketched_sgd.py                       everything, about 25 minutes of one core
    python benchmarks/papers/sketched_sgd.py --quick               fewer points and steps: 2 minutes, to see that it runs
    python benchmarks/papers/sketched_sgd.py --only fashion-mnist  or sotu
    python benchmarks/papers/sketched_sgd.py --tune                how the learning rates were chosen

Two trainings: a CNN on Fashion-MNIST, scored by its test accuracy, and a word-level LSTM on the State of the Union
addresses, scored by its perplexity on the latest of them. What is looked at is what N. Ivkin et al., "Communication-efficient
distributed SGD with Sketching", 2019, claim of the method: that quality holds while the bytes fall, and that neither
quality nor bytes change with the number of workers, where local top-k needs more bytes the more workers there are.

Compression is dense bytes over a method's bytes, of one rank in one step, and sizes are chosen by the bytes in a ring; the
other accounting is a parameter server's, as the paper counts. True top-k saves no bytes; it stands beside the sketch with
the same k, as what a perfect sketch would do. All compressed methods run without momentum of their own: at high
compression masking throws most of it away. The global batch is the same for any number of workers.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "HVDCOMPRESS_NUM_THREADS"):
    os.environ[variable] = "1"

import matplotlib
import numpy as np
import torch
from corpus import CorpusError
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tasks import Addresses, FashionMNIST, Task, train
from workers import Bytes, Diverged, Exchange, LockStep, OneForAll, Ranks, dense_bytes, layout_of, ring_bytes

from hvdcompress import make
from hvdcompress.codecs import TopK
from hvdcompress.core import Layout, Reducer
from hvdcompress.reducers import LocalTopK, SketchedSGD, TrueTopK
from hvdcompress.reducers.accumulation import split_of

FEW = 4  # workers, in the comparison of compressions; so many are simulated one by one
COMPRESSIONS = (2.0, 5.0, 10.0, 30.0, 100.0)
COMPRESSION = 10.0  # of COMPRESSIONS; in the comparison of workers, and where rates were tuned
QUICK_STEPS, QUICK_COMPRESSIONS, QUICK_WORKERS = 60, (COMPRESSION, 100.0), 16
SEVERAL = 16  # workers; with more of them local top-k is trained with the first seed only, since it takes long
SAME_K, SAME_BYTES = ", same k", ", same bytes"
NOTES = f"""
compression: dense bytes over those of the method, of the same accounting. ring: what a rank sends, its status record
included; counted where {FEW} ranks are simulated one by one, else by the formula. paper: up and down through a parameter
server, as the method's paper counts, in the last step of the first seed. k of local top-k: of each rank. True top-k saves no
bytes: it has the k of the sketch beside it. Dense and sketched trainings with more workers are one training that is fed the
mean gradient; where its score differs from that of {FEW} workers, rounding has grown as another seed would. same k: what each
worker sends stays the same; same bytes: k is as small as the compression in the ring asks.
"""


@dataclass(frozen=True, eq=False)
class Method:
    """A method of the registry as it is trained here.

    `rates` are the best of their grids on the validation split, by --tune --seeds 2: `FEW` workers, compression `COMPRESSION`.
    """

    name: str
    title: str
    rates: Mapping[str, float]
    momentum: float = 0.0  # of the optimizer
    color: str = "black"


DENSE_MOMENTUM = Method("dense", "dense, momentum 0.9", {"fashion-mnist": 0.06, "sotu": 9.6}, momentum=0.9, color="gray")
DENSE = Method("dense", "dense", {"fashion-mnist": 0.3, "sotu": 34})
SKETCH = Method("sketch", "Sketched-SGD", {"fashion-mnist": 0.42, "sotu": 34}, color="tab:blue")
LOCAL = Method("local_topk", "local top-k", {"fashion-mnist": 0.3, "sotu": 34}, color="tab:red")
TRUE = Method("true_topk", "true top-k", {"fashion-mnist": 0.42, "sotu": 34}, color="tab:green")
METHODS = (DENSE_MOMENTUM, DENSE, SKETCH, LOCAL, TRUE)


@dataclass(frozen=True)
class Problem:
    """A task, and how it is shown."""

    make: Callable[..., Task]
    score: str
    workers: tuple[int, ...]  # as many as divide the global batch
    rates: tuple[float, ...]  # the grid
    rates_with_momentum: tuple[float, ...]  # and that of momentum 0.9
    steps: int
    sign: int  # of the score where less is better


PROBLEMS = {
    "fashion-mnist": Problem(
        FashionMNIST,
        "accuracy (%)",
        (4, 16, 64, 256),
        (0.15, 0.21, 0.3, 0.42, 0.6),
        (0.03, 0.06, 0.12, 0.24),
        300,
        -1,
    ),
    "sotu": Problem(Addresses, "perplexity", (4, 16, 64), (12, 17, 24, 34, 48), (2.4, 4.8, 9.6, 19.2), 300, 1),
}


@dataclass(frozen=True)
class Job:
    """One training."""

    problem: str
    method: Method
    reducer: Reducer
    workers: int
    seed: int
    lr: float
    steps: int
    variant: str = ""
    compression: float | None = None  # what was asked for

    @property
    def row(self) -> tuple[object, ...]:
        """What trainings that differ in their seed only have in common."""
        return self.method.title, self.variant, self.compression, self.workers

    @property
    def title(self) -> str:
        asked = f" {self.compression:g}x" if self.compression else ""
        return f"{self.problem}: {self.method.title}{self.variant}{asked}, {self.workers} workers"


@dataclass
class Row:
    """What trainings with several seeds came to."""

    method: Method
    reducer: Reducer
    workers: int
    variant: str
    compression: float | None
    lr: float
    bytes: Bytes
    scores: list[float] = field(default_factory=list)  # NaN where it diverged

    @property
    def median(self) -> float:
        return float(np.median(self.scores))

    @property
    def title(self) -> str:
        return self.method.title + self.variant

    def score(self) -> tuple[str, str]:
        """Median and range."""
        diverged = sum(np.isnan(self.scores))
        if diverged:
            return "diverged", f"{diverged} of {len(self.scores)}"
        return f"{self.median:.2f}", f"{min(self.scores):.2f} to {max(self.scores):.2f}"


def sized(name: str, layout: Layout, workers: int, compression: float) -> Reducer:
    """The method with as many bytes in a ring as the compression allows, without momentum.

    Raises:
        ValueError: what is sent exactly, and the status records, are more than that.
    """
    allowed = dense_bytes(layout, workers).ring / compression

    def of(ratio: float) -> Reducer:
        return make(name, ratio=ratio, momentum=0.0)

    low, high = 1e-9, 1.0
    if ring_bytes(of(low), layout, workers) > allowed:
        raise ValueError(f"{name} cannot compress {layout.size} elements {compression:g} times with {workers} workers")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if ring_bytes(of(middle), layout, workers) <= allowed else (low, middle)
    return of(low)


def reducer_of(method: Method, layout: Layout, workers: int, compression: float) -> Reducer:
    if method.name == "dense":
        return make("dense")
    if method.name == "true_topk":
        sketch = reducer_of(SKETCH, layout, workers, compression)
        assert isinstance(sketch, SketchedSGD)
        return make("true_topk", k=sketch.plan(split_of(layout, sketch.exact_below).selectable).k, momentum=0.0)
    return sized(method.name, layout, workers, compression)


def short_cut(reducer: Reducer, layout: Layout, workers: int, seed: int) -> Exchange:
    if isinstance(reducer, LocalTopK):
        return LockStep(reducer, layout, workers)
    return OneForAll(reducer, layout, workers, seed)


def exchange_of(reducer: Reducer, layout: Layout, workers: int, seed: int) -> Exchange:
    if workers <= FEW and isinstance(reducer, (SketchedSGD, LocalTopK)):
        return Ranks(reducer, layout, workers, seed)
    return short_cut(reducer, layout, workers, seed)


def run(job: Job, tuning: bool, tick: Callable[[], None]) -> tuple[float, Bytes]:
    """The score and the bytes of the last step; NaN for what is not known since it diverged."""
    task = PROBLEMS[job.problem].make(job.seed, tuning)
    layout = layout_of(task.parameters)
    exchange = exchange_of(job.reducer, layout, job.workers, job.seed)
    try:
        train(task, exchange, job.lr, job.method.momentum, job.steps, tick)
        return task.score(), exchange.bytes()
    except Diverged:
        return math.nan, Bytes(ring_bytes(job.reducer, layout, job.workers), math.nan)


def jobs_by_compression(name: str, compressions: Iterable[float], seeds: int, steps: int) -> list[Job]:
    """`FEW` workers; dense once."""
    layout = layout_of(PROBLEMS[name].make(0).parameters)
    asked = [(method, None) for method in (DENSE_MOMENTUM, DENSE)]
    asked += [(method, compression) for method in (SKETCH, LOCAL, TRUE) for compression in compressions]
    return [
        Job(name, method, reducer, FEW, seed, method.rates[name], steps, compression=compression)
        for method, compression in asked
        for reducer in [reducer_of(method, layout, FEW, compression or 1)]
        for seed in range(seeds)
    ]


def jobs_by_workers(name: str, workers: Iterable[int], seeds: int, steps: int) -> list[Job]:
    """More than `FEW` workers, with what compresses `COMPRESSION` times for `FEW`, and local top-k with smaller k too.

    What is linear is trained once a seed, for the largest number of workers: there is no difference between the others.
    """
    layout = layout_of(PROBLEMS[name].make(0).parameters)
    many = [count for count in workers if count > FEW]
    sketch, local = (reducer_of(method, layout, FEW, COMPRESSION) for method in (SKETCH, LOCAL))
    asked = [(SKETCH, sketch, max(many), "")]
    for count in many:
        asked.append((LOCAL, local, count, SAME_K))
        asked.append((LOCAL, reducer_of(LOCAL, layout, count, COMPRESSION), count, SAME_BYTES))
    return [
        Job(name, method, reducer, count, seed, method.rates[name], steps, variant, COMPRESSION)
        for method, reducer, count, variant in asked
        for seed in range(1 if method is LOCAL and count > SEVERAL else seeds)
    ]


def jobs_of_tuning(name: str, seeds: int, steps: int) -> list[Job]:
    problem = PROBLEMS[name]
    layout = layout_of(problem.make(0).parameters)
    return [
        Job(name, method, reducer_of(method, layout, FEW, COMPRESSION), FEW, seed, rate, steps, f", lr {rate:g}", COMPRESSION)
        for method in METHODS
        for rate in (problem.rates_with_momentum if method.momentum else problem.rates)
        for seed in range(seeds)
    ]


def run_all(jobs: list[Job], tuning: bool, console: Console) -> dict[str, list[Row]]:
    """The rows of each problem."""
    rows: dict[str, dict[tuple[object, ...], Row]] = {}
    columns = (
        TextColumn("{task.description:<60}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as progress:
        steps = progress.add_task("", total=sum(job.steps for job in jobs))
        done = 0
        for job in jobs:
            progress.update(steps, description=f"{job.title}, seed {job.seed}")
            began = time.perf_counter()
            score, sent = run(job, tuning, lambda: progress.advance(steps))
            done += job.steps
            progress.update(steps, completed=done)
            new = Row(job.method, job.reducer, job.workers, job.variant, job.compression, job.lr, sent)
            row = rows.setdefault(job.problem, {}).setdefault(job.row, new)
            row.scores.append(score)
            if math.isnan(row.bytes.paper):
                row.bytes = sent
            if not console.is_terminal:
                console.print(f"{job.title}, seed {job.seed}: {score:.2f} in {time.perf_counter() - began:.0f} s")
    return {problem: list(of_problem.values()) for problem, of_problem in rows.items()}


def checks(steps: int = 20) -> Table:
    """How far the short cuts are from simulating every rank, on Fashion-MNIST."""
    table = Table(title=f"short cuts against simulating every rank, fashion-mnist, {steps} steps; bytes of a rank and step")
    for title in (
        "method",
        "workers",
        "weights differ, of the largest",
        "ring bytes counted",
        "by formula",
        "paper bytes",
        "of short cut",
    ):
        table.add_column(title, justify="left" if title == "method" else "right")
    layout = layout_of(FashionMNIST(seed=0).parameters)
    for method, workers in ((SKETCH, FEW), (SKETCH, 16), (TRUE, FEW), (LOCAL, FEW)):
        reducer = reducer_of(method, layout, FEW, COMPRESSION)
        exchanges: tuple[Exchange, Exchange] = Ranks(reducer, layout, workers, 0), short_cut(reducer, layout, workers, 0)
        each, short = (train(FashionMNIST(seed=0), exchange, lr=0.1, momentum=0, steps=steps) for exchange in exchanges)
        counted, formula = (exchange.bytes() for exchange in exchanges)
        table.add_row(
            method.title,
            str(workers),
            f"{np.abs(each - short).max() / np.abs(each).max():.1e}",
            *(f"{number:,.0f}" for number in (counted.ring, formula.ring, counted.paper, formula.paper)),
        )
    return table


def k_of(reducer: Reducer, layout: Layout) -> str:
    """Coordinates that a step, or for local top-k a rank in a step, chooses."""
    if isinstance(reducer, SketchedSGD):
        return f"{reducer.plan(split_of(layout, reducer.exact_below).selectable).k:,}"
    if isinstance(reducer, (LocalTopK, TrueTopK)):
        codec = TopK(reducer.ratio, reducer.k)
        return f"{codec.chosen(split_of(layout, reducer.exact_below).selectable):,}"
    return ""


def shown(row: Row, layout: Layout) -> tuple[str, ...]:
    """The cells of both tables: k, bytes and compression in both accountings, median and range."""
    dense = dense_bytes(layout, row.workers)
    cells = []
    for whole, sent in zip(dense, row.bytes):
        cells += ["", ""] if math.isnan(sent) else [f"{sent:,.0f}", f"{whole / sent:.3g}x"]
    return k_of(row.reducer, layout), *cells, *row.score()


def table_of(title: str, first: tuple[str, str], score: str, last: str) -> Table:
    table = Table(title=title)
    table.add_column(first[0])
    for name in (first[1], "k", "ring bytes", "compression", "paper bytes", "compression", score, "range", last):
        table.add_column(name, justify="right")
    return table


def compression_table(name: str, rows: list[Row], layout: Layout, steps: int) -> Table:
    problem, seeds = PROBLEMS[name], len(rows[0].scores)
    title = (
        f"{name}, test split: {layout.size:,} parameters, {FEW} workers, {steps} steps, seeds: {seeds}; bytes of a rank and step"
    )
    table = table_of(title, ("method", "asked for"), problem.score, "lr")
    for row, following in zip(rows, [*rows[1:], None]):
        asked = f"{row.compression:g}x" if row.compression else ""
        table.add_row(row.method.title, asked, *shown(row, layout), f"{row.lr:g}")
        if following is None or following.method is not row.method:
            table.add_section()
    return table


def workers_table(name: str, rows: list[Row], layout: Layout, steps: int) -> Table:
    title = f"{name}, test split: {steps} steps; what compresses {COMPRESSION:g}x in a ring of {FEW}; bytes of a rank and step"
    table = table_of(title, ("method", "workers"), PROBLEMS[name].score, "seeds")
    for row, following in zip(rows, [*rows[1:], None]):
        table.add_row(row.title, str(row.workers), *shown(row, layout), str(len(row.scores)))
        if following is None or following.title != row.title:
            table.add_section()
    return table


def tuning_table(name: str, rows: list[Row]) -> Table:
    problem = PROBLEMS[name]
    table = Table(title=f"{name}, validation split: {FEW} workers, {COMPRESSION:g}x; the best rate of each method is marked")
    for title in ("method", "lr", problem.score, "range"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for method in METHODS:
        own = [row for row in rows if row.method is method]
        best = min(own, key=lambda row: (np.isnan(row.median), problem.sign * row.median))
        for row in own:
            table.add_row(method.title, f"{row.lr:g}", *row.score(), style="bold" if row is best else None)
        table.add_section()
    return table


def rows_by_workers(rows: list[Row], many: list[Row], layout: Layout, workers: Iterable[int]) -> list[Row]:
    """All rows of the comparison of workers, of the trainings with `FEW` workers and those with more."""

    def linear(row: Row, count: int) -> Row:
        """The same training stands for another number of workers; only the ring's bytes are others."""
        return replace(row, workers=count, bytes=row.bytes._replace(ring=ring_bytes(row.reducer, layout, count)))

    (dense,) = (row for row in rows if row.method is DENSE)
    few = {row.method: row for row in rows if row.compression == COMPRESSION}
    (sketch,) = (row for row in many if row.method is SKETCH)
    local = [row for row in many if row.method is LOCAL]
    return [
        *(linear(dense, count) for count in workers),
        *(linear(sketch, count) if count > FEW else few[SKETCH] for count in workers),
        replace(few[LOCAL], variant=SAME_K),
        *sorted(local, key=lambda row: (row.variant == SAME_BYTES, row.workers)),
    ]


def plot(results: Mapping[str, tuple[list[Row], list[Row]]], path: Path) -> None:
    """For each problem: quality against compression, and bytes against workers with the quality beside them."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), 2, figsize=(14, 4.6 * len(results)), layout="constrained", squeeze=False)
    for (left, right), (name, (by_compression, by_workers)) in zip(axes, results.items()):
        plot_quality(left, by_compression)
        left.set(xlabel=f"compression in a ring of {FEW} (true top-k: its sketch's)", ylabel=PROBLEMS[name].score, title=name)
        plot_bytes(right, by_workers)
        right.set(
            xlabel="workers", ylabel="bytes of a rank and step", title=f"{name}: beside the points the {PROBLEMS[name].score}"
        )
        for one in (left, right):
            one.grid(alpha=0.3)
        left.legend(fontsize=8)
        right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_quality(axes: Axes, rows: list[Row]) -> None:
    for method in METHODS:
        own = [row for row in rows if row.method is method and not np.isnan(row.median)]
        if method.name == "dense":
            for row in own:
                axes.axhline(row.median, color=method.color, linestyle="--", label=method.title)
                axes.axhspan(min(row.scores), max(row.scores), color=method.color, alpha=0.1)
            continue
        medians = np.array([row.median for row in own])
        spread = [medians - [min(row.scores) for row in own], [max(row.scores) for row in own] - medians]
        asked = [row.compression for row in own]
        axes.errorbar(asked, medians, yerr=spread, marker="o", capsize=3, color=method.color, label=f"{method.title}, range")
    axes.set_xscale("log")
    asked = sorted({row.compression for row in rows if row.compression})
    axes.set_xticks(asked, [f"{compression:g}x" for compression in asked], minor=False)
    axes.minorticks_off()


def plot_bytes(axes: Axes, rows: list[Row]) -> None:
    for title in dict.fromkeys(row.title for row in rows):
        own = [row for row in rows if row.title == title]
        workers, color = [row.workers for row in own], own[0].method.color
        marker = "s" if own[0].variant == SAME_BYTES else "o"
        axes.plot(workers, [row.bytes.ring for row in own], marker=marker, color=color, label=f"{title}, ring")
        axes.plot(workers, [row.bytes.paper for row in own], marker=marker, color=color, linestyle=":", fillstyle="none")
        place = (0, -11) if own[0].method is SKETCH else (0, 6)  # points of both lie on each other
        for row in own:
            at = (row.workers, row.bytes.ring)
            axes.annotate(row.score()[0], at, place, textcoords="offset points", ha="center", fontsize=7, color=color)
    axes.plot([], [], color="gray", linestyle=":", marker="o", fillstyle="none", label="parameter server")
    counts = sorted({row.workers for row in rows})
    axes.set(xscale="log", yscale="log")
    axes.margins(0.1)
    axes.set_xticks(counts, [str(count) for count in counts], minor=False)
    axes.minorticks_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PROBLEMS))
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps, two compressions, at most 16 workers")
    parser.add_argument("--tune", action="store_true", help="try the grids of learning rates on the validation splits instead")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("papers-out"))
    args = parser.parse_args()

    torch.set_num_threads(1)
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    began, names = time.perf_counter(), [args.only] if args.only else list(PROBLEMS)
    seeds = 1 if args.quick else args.seeds
    steps = {name: QUICK_STEPS if args.quick else PROBLEMS[name].steps for name in names}
    if args.tune:
        jobs = [job for name in names for job in jobs_of_tuning(name, seeds, steps[name])]
        for name, rows in run_all(jobs, True, console).items():
            console.print(tuning_table(name, rows))
        return

    most = QUICK_WORKERS if args.quick else math.inf
    workers = {name: [count for count in PROBLEMS[name].workers if count <= most] for name in names}
    compressions = QUICK_COMPRESSIONS if args.quick else COMPRESSIONS
    jobs = [
        job
        for name in names
        for job in jobs_by_compression(name, compressions, seeds, steps[name])
        + jobs_by_workers(name, workers[name], seeds, steps[name])
    ]
    console.print(checks())
    results: dict[str, tuple[list[Row], list[Row]]] = {}
    for name, rows in run_all(jobs, False, console).items():
        layout = layout_of(PROBLEMS[name].make(0).parameters)
        by_compression = [row for row in rows if row.workers == FEW]
        many = [row for row in rows if row.workers > FEW]
        by_workers = rows_by_workers(by_compression, many, layout, workers[name])
        console.print(compression_table(name, by_compression, layout, steps[name]))
        console.print(workers_table(name, by_workers, layout, steps[name]))
        results[name] = by_compression, by_workers
    console.print(NOTES)
    args.output.mkdir(parents=True, exist_ok=True)
    plot(results, args.output / "sketched_sgd.png")
    console.print(f"curves: {args.output / 'sketched_sgd.png'}; {(time.perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    try:
        main()
    except (CorpusError, FileNotFoundError) as error:  # data that is not to be had
        raise SystemExit(str(error)) from error
