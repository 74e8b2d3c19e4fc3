"""DORE's linear regression: seven methods, two step sizes, 20 simulated ranks.

    python benchmarks/papers/dore.py            everything, about 18 minutes of one core
    python benchmarks/papers/dore.py --quick    a smaller problem with 4 ranks: half a minute, to see that it runs

The comparison is that of X. Liu et al., "A Double Residual Compression Algorithm for Efficient Distributed Learning", 2020:
where local gradients are exact but do not vanish at the optimum, which methods converge linearly, as SGD does, which stay at
a distance, and what becomes of their residuals? The problem, see regression.py, is this project's: how its matrix and its
noise are scaled, and with that the distances, are not the paper's. Step sizes are gamma L, L the largest curvature.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HVDCOMPRESS_NUM_THREADS"):
    os.environ[variable] = "1"

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from regression import Regression
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hvdcompress import Layout, make
from hvdcompress.core import Group, Reducer
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.reducers import Dense
from hvdcompress.reducers.two_pass import TwoPass
from hvdcompress.session import STATUS_BYTES
from hvdcompress.traffic import Traffic

STEP_SIZES = (0.0547, 0.0274)
LAST = 200  # steps, whose mean distance is shown
DIVERGED = 1e6  # a distance
EVERY = 20  # steps, between two looks at the residuals
TOLERANCE = 0.1
FIT = (1e-2, 1e-5)  # distances of SGD, over the first one, between which slopes are fitted
LARGE = Layout.of([("w", (1 << 20,))])

# Mean distances over the last `LAST` steps, at each step size: earlier measurements of this project, in float64 and with
# draws of NumPy's generator, with seed 0. They are not the paper's.
EXPECTED: dict[str, tuple[float | str | None, float | str | None]] = {
    "SGD": (None, 1.17e-6),
    "QSGD": (0.136, 0.098),
    "MEM-SGD": (0.109, 0.054),
    "DIANA": (None, 1.17e-6),
    "DoubleSqueeze": ("diverges", 0.96),
    "DoubleSqueeze (top-k)": (0.098, 0.046),
    "DORE": (None, 1.17e-6),
}

NOTES = (
    f"distance: ||x - x*||, mean over the last {LAST} steps. expected: this project's own earlier figures for seed 0, not the "
    f"paper's. slope: of log distance, over SGD's, while SGD's relative distance is between {FIT[0]:g} and {FIT[1]:g}. worker "
    "residual: the largest norm, over the ranks, of what a rank compresses after the last step; master residual: the norm of "
    f"what the master compressed in it. diverged: the step at which the distance passed {DIVERGED:g}, or ceased to be finite.",
    "Gradients, codes and memories are float32, as in real jobs, and x is float64: what converges linearly does so down to "
    "float32's rounding of the local gradients, here {floor:.1e} of ||x*|| = {start:.1f}, and not to float64's.",
    "Bytes are counted, of a rank and step, in both accountings. ring: sent by a rank in a ring, with codes gathered, frame "
    "headers and {status} bytes of status records. server: up and down through a parameter server, as the paper counts, payloads "
    "only. {d} elements are so few that the former are mostly headers and records; 1M: the share of the bytes that a rank would "
    "send with 2^20 elements, by the formula for codes sent to their owners and the density of the last step (top-k: gathered).",
)


@dataclass(frozen=True)
class Method:
    title: str
    color: str
    reducer: Callable[[int], Reducer]  # of the block
    linear: bool = False  # is said to converge to x*


METHODS = (
    Method("SGD", "black", lambda block: make("dense"), linear=True),
    Method("QSGD", "tab:orange", lambda block: make("gather", codec=f"ternary:block={block}", exchange="allgather")),
    Method("MEM-SGD", "tab:olive", lambda block: make("mem_sgd", block=block, exchange="allgather")),
    Method("DIANA", "tab:green", lambda block: make("diana", block=block, exchange="allgather"), linear=True),
    Method("DoubleSqueeze", "tab:red", lambda block: make("double_squeeze", block=block, exchange="allgather")),
    Method("DoubleSqueeze (top-k)", "tab:purple", lambda block: make("double_squeeze_topk", ratio=0.05, exchange="allgather")),
    Method("DORE", "tab:blue", lambda block: make("dore", block=block, exchange="allgather"), linear=True),
)


@dataclass(frozen=True)
class Setting:
    """The size of the problem, and how long it is descended."""

    ranks: int
    rows: int
    d: int
    block: int
    steps: int
    linear_steps: tuple[int, ...]  # at each step size, of what converges linearly

    def steps_of(self, method: Method, step_size: float) -> int:
        return self.linear_steps[STEP_SIZES.index(step_size)] if method.linear else self.steps

    def problem(self, seed: int) -> Regression:
        return Regression(self.ranks, self.rows, self.d, seed)


FULL = Setting(ranks=20, rows=1200, d=500, block=256, steps=4000, linear_steps=(5000, 8000))
QUICK = Setting(ranks=4, rows=400, d=100, block=64, steps=2000, linear_steps=(2000, 2000))


@dataclass
class Run:
    """One descent."""

    distances: list[float] = field(default_factory=list)  # after each step
    looks: list[int] = field(default_factory=list)  # steps at which the residuals were looked at
    workers: list[float] = field(default_factory=list)  # residual norms there, the largest over the ranks
    masters: list[float] = field(default_factory=list)
    diverged: bool = False
    bytes: Traffic = field(default_factory=Traffic)  # of a rank and step
    large: float = 0.0  # share of the bytes with a large bucket

    @property
    def distance(self) -> float:
        return float(np.mean(self.distances[-LAST:]))

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.distances[-LAST:]))))


Runs = dict[tuple[str, float], list[Run]]  # by method and step size; a run for each seed


def run(problem: Regression, method: Method, step_size: float, setting: Setting, tick: Callable[[], None]) -> Run:
    done, reducer, x = Run(), method.reducer(setting.block), np.zeros(problem.d)
    first, simulation = Traffic(), None
    for step, (following, simulation) in enumerate(problem.descend(reducer, step_size, setting.steps_of(method, step_size)), 1):
        before, x = x, following
        distance = float(np.linalg.norm(x - problem.solution))
        done.distances.append(distance)
        if step == 1:
            first = total_bytes(simulation)
        if step % EVERY == 0:
            done.looks.append(step)
            look_at_residuals(done, problem, x, (before - x) / problem.rate(step_size), simulation)
        tick()
        if not distance <= DIVERGED:
            done.diverged = True
            break
    assert simulation is not None
    # The first step's have the handshake in them.
    since, steps = total_bytes(simulation), problem.ranks * (len(done.distances) - 1)
    done.bytes = Traffic(*((getattr(since, name) - getattr(first, name)) / steps for name in Traffic.__dataclass_fields__))
    done.large = large_share(reducer, problem.ranks, simulation)
    return done


def total_bytes(simulation: Simulation) -> Traffic:
    """Of all ranks and steps."""
    return sum((session.stats().total for session in simulation.sessions), Traffic())


def look_at_residuals(done: Run, problem: Regression, x: np.ndarray, mean: np.ndarray, simulation: Simulation) -> None:
    """Notes the norms of what the ranks are about to compress, and of what the master, of whose code `mean` came, just has."""
    if isinstance(simulation.sessions[0].reducer, Dense):
        return
    norms = []
    for rank, message in enumerate(problem.grads(x)):
        arrays = simulation.arrays(rank)
        if "copies" in arrays:
            message = message - arrays["copies"][rank]
        if "own_e" in arrays:
            message = message + arrays["own_e"]
        norms.append(float(np.linalg.norm(message)))
    done.workers.append(max(norms))
    if "e" in simulation.arrays(0):
        done.masters.append(float(np.linalg.norm(mean + simulation.arrays(0)["e"])))


def large_share(reducer: Reducer, ranks: int, simulation: Simulation) -> float:
    """Share of the dense bytes with `LARGE`, by the method's formula with the densities of the last step."""
    group = Group(0, ranks)
    if isinstance(reducer, TwoPass) and reducer.settings(LARGE).alignment:
        reducer = replace(reducer, exchange="sharded")
    return reducer.wire_bytes(LARGE, group, simulation.sessions[0].stats().metrics) / Dense().wire_bytes(LARGE, group)


def run_all(setting: Setting, seeds: int, console: Console) -> Runs:
    jobs = [(size, method, seed) for size in STEP_SIZES for method in METHODS for seed in range(seeds)]
    problems, runs = [setting.problem(seed) for seed in range(seeds)], Runs()
    columns = (
        TextColumn("{task.description:<50}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as progress:
        steps, done = progress.add_task("", total=sum(setting.steps_of(method, size) for size, method, _ in jobs)), 0
        for size, method, seed in jobs:
            progress.update(steps, description=f"{method.title}, step {size:g}, seed {seed}")
            began = time.perf_counter()
            result = run(problems[seed], method, size, setting, lambda: progress.advance(steps))
            done += setting.steps_of(method, size)
            progress.update(steps, completed=done)
            runs.setdefault((method.title, size), []).append(result)
            if not console.is_terminal:
                ended = "diverged" if result.diverged else f"{result.distance:.3g}"
                console.print(f"{method.title}, step {size:g}, seed {seed}: {ended} in {time.perf_counter() - began:.0f} s")
    return runs


def slope(distances: list[float], reference: list[float]) -> float:
    """Of log distance, over that of a reference, while the latter's relative distance is in `FIT`."""
    relative = np.array(reference) / reference[0]
    where = np.flatnonzero((relative <= FIT[0]) & (relative >= FIT[1]))
    fitted = [np.polyfit(where, np.log(np.array(path)[where]), 1)[0] for path in (distances, reference)]
    return float(fitted[0] / fitted[1])


def over_seeds(values: Iterable[float], form: str) -> str:
    """The median and, of more than one value, the range."""
    values = list(values)
    shown = format(float(np.median(values)), form)
    return shown if len(values) == 1 else f"{shown} ({min(values):{form}} to {max(values):{form}})"


def compared(runs: list[Run], expected: float | str | None) -> tuple[str, str]:
    """What was expected of seed 0, and how far from it seed 0 is."""
    if expected is None:
        return "", ""
    if isinstance(expected, str):
        return expected, "yes" if runs[0].diverged else "[bold]no[/bold]"
    off = runs[0].distance / expected - 1
    return f"{expected:g}", f"{off:+.1%}" if abs(off) <= TOLERANCE else f"[bold]{off:+.1%}, over {TOLERANCE:.0%}[/bold]"


def report(runs: Runs, setting: Setting, step_size: float, console: Console) -> None:
    seeds = len(next(iter(runs.values())))
    table = Table(
        title=f"gamma L = {step_size:g}, {setting.ranks} ranks, {setting.rows} x {setting.d}, blocks of {setting.block}; "
        f"{seeds} seed{'s' * (seeds > 1)}, median and range"
    )
    names = ["steps", "distance", "expected", "off by", "slope", "worker residual", "master residual", "diverged"]
    for name in ("method", *names, "ring", "share", "server", "share", "1M"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method in METHODS:
        own = runs[method.title, step_size]
        diverged = [len(one.distances) for one in own if one.diverged]
        known = EXPECTED.get(method.title) if setting is FULL else None
        slopes = [slope(one.distances, sgd.distances) for one, sgd in zip(own, runs["SGD", step_size])] if method.linear else []
        mean = sum((one.bytes for one in own), Traffic())
        table.add_row(
            method.title,
            f"{max(len(one.distances) for one in own):,}",
            "" if diverged else over_seeds((one.distance for one in own), ".3g"),
            *compared(own, known[STEP_SIZES.index(step_size)] if known else None),
            over_seeds(slopes, ".3f") if slopes else "",
            over_seeds((one.workers[-1] for one in own), ".2g") if own[0].workers else "",
            over_seeds((one.masters[-1] for one in own), ".2g") if own[0].masters else "",
            ", ".join(f"{step:,}" for step in diverged),
            f"{mean.wire / seeds:,.0f}",
            f"{mean.ratio:.1%}",
            f"{mean.paper / seeds:,.0f}",
            f"{mean.paper_ratio:.1%}",
            f"{np.mean([one.large for one in own]):.1%}",
        )
    console.print(table)


def report_plateau(runs: Runs, setting: Setting, console: Console) -> None:
    """QSGD's distance against the Lyapunov equation's."""
    for size in STEP_SIZES:
        for seed, one in enumerate(runs["QSGD", size]):
            predicted = setting.problem(seed).plateau(size, setting.block)
            console.print(
                f"QSGD, gamma L = {size:g}, seed {seed}: root mean square distance over the last {LAST} steps {one.rms:.4f}, "
                f"predicted by the Lyapunov equation {predicted:.4f}: {one.rms / predicted - 1:+.1%}"
            )


def plot(runs: Runs, path: Path) -> None:
    """Distances, and under them the residual norms, of seed 0; a column for each step size."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(STEP_SIZES), figsize=(13, 9), layout="constrained", sharey="row", squeeze=False)
    for size, upper, lower in zip(STEP_SIZES, *axes):
        for method in METHODS:
            one = runs[method.title, size][0]
            steps = np.arange(1, len(one.distances) + 1)
            # DIANA and DORE lie on SGD: all three are to be seen.
            style, width = {"DIANA": ("--", 1.2), "DORE": (":", 2)}.get(method.title, ("-", 1.2))
            upper.plot(steps, one.distances, style, color=method.color, linewidth=width, label=method.title)
            plot_residuals(lower, method, one)
        upper.set(title=f"gamma L = {size:g}", xlabel="step", ylabel="||x - x*||", yscale="log", ylim=(None, 1e3))
        lower.set(xlabel="step", ylabel="norm of the residual", yscale="log", ylim=(None, 1e3))
        for one_axes in (upper, lower):
            one_axes.grid(alpha=0.3)
        upper.legend(fontsize=8, loc="upper right")
        lower.legend(fontsize=8, loc="lower left")
    figure.suptitle("above the distance, below the residual norms: of a rank (the largest), and of the master; seed 0")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_residuals(axes: Axes, method: Method, one: Run) -> None:
    for norms, style, where in ((one.workers, "-", "worker"), (one.masters, "--", "master")):
        if norms:
            axes.plot(one.looks, norms, style, color=method.color, linewidth=1, label=f"{method.title}, {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 4 ranks, 400 x 100, 2,000 steps: nothing to compare with")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("papers-out"))
    args = parser.parse_args()

    console = Console()
    console = console if console.is_terminal else Console(width=200)
    began, setting, seeds = time.perf_counter(), QUICK if args.quick else FULL, 1 if args.quick else args.seeds
    if args.quick:
        console.print(f"quick: {setting.ranks} ranks, {setting.rows} x {setting.d}; the expected figures are of another problem")
    runs = run_all(setting, seeds, console)
    for size in STEP_SIZES:
        report(runs, setting, size, console)
    report_plateau(runs, setting, console)
    start, floor = float(np.linalg.norm(setting.problem(0).solution)), runs["SGD", max(STEP_SIZES)][0].distance
    for note in NOTES:
        known = {"start": start, "floor": floor / start, "d": setting.d, "status": STATUS_BYTES * (setting.ranks - 1)}
        console.print(note.format(**known), highlight=False)
    args.output.mkdir(parents=True, exist_ok=True)
    plot(runs, args.output / "dore.png")
    console.print(f"curves: {args.output / 'dore.png'}; {(time.perf_counter() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
