"""How large the error of an unbiased code is for its bytes: atoms of ATOMO, QSGD and TernGrad, on real gradients.

The variance is E||Q(g) - g||^2 over ||g||^2, exact, as the codecs have it with each payload. A share is payload bytes, with
all headers, over those of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from nets import Stage
from rich.console import Console
from rich.table import Table

from hvdcompress import kernels, make
from hvdcompress.codecs import Codec, Entrywise, Spectral
from hvdcompress.core import Array, Layout

RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # of payloads to float32
RESHAPE_RATIOS = (0.05, 0.1, 0.25)
ALIKE = 0.02  # variances that differ by no more
CHECKED_RATIO, CHECKED_DRAWS = 0.05, 10
VARIANCE_NOTES = (
    "Variances are medians over batches; in brackets the share of the bytes that was counted. measured: the mean of "
    f"||Q(g) - g||^2 over {CHECKED_DRAWS} draws of one batch, over its expectation, and the standard error of that; of atoms at "
    f"{CHECKED_RATIO:.0%}. The expectation of halves leaves their rounding out; what is measured has it. QSGD: blocks of 512; "
    "TernGrad: a scale a tensor, no clipping."
)
RESHAPE_NOTES = (
    "energy: share of ||g||^2. paper / out: variance with the tensor made a matrix as ATOMO's published code does, over that "
    "with this project's default, at the same bytes; above 1 the default is better; alike: within {alike:.0%}. criterion: "
    "sqrt(m + n) ||X||_* / ||X||_1,1 of the default's matrix X; it says spectral atoms where it is at most 1, else entries. "
    "same floats: variance of spectral atoms over that of entries, for m + n floats, that is one atom or m + n entries, "
    "expected. same bytes: the same for {bytes:.0%} of the tensor's bytes in this project's formats, where an entry with p < 1 "
    "costs its place and a sign but no float."
)


class Point(NamedTuple):
    """A code of some bytes, over several batches."""

    share: float  # mean
    variance: float  # median
    low: float
    high: float


@dataclass(frozen=True)
class Sparse:
    """A method that takes any budget."""

    title: str
    color: str
    options: Mapping[str, str]
    style: str = "-"

    def codec(self, layout: Layout, ratio: float) -> Codec:
        """For all tensors of a model; `ratio` is of each tensor's bytes."""
        return make("atomo", budget=ratio, unit="ratio", **self.options).settings(layout).uplink


@dataclass(frozen=True)
class Quantiser:
    """A method that has the bytes that it has."""

    title: str
    family: str
    color: str
    marker: str
    method: str

    def codec(self, layout: Layout) -> Codec:
        return make(self.method).settings(layout).uplink


def qsgd(levels: int, norm: str, color: str, marker: str) -> Quantiser:
    title = f"QSGD, {levels} level{'s' * (levels > 1)}, {norm}"
    return Quantiser(title, f"QSGD, {norm}", color, marker, f"qsgd:levels={levels},norm={norm}")


ATOMS = (
    Sparse("entries", "tab:red", {"atoms": "entrywise"}),
    Sparse("spectral, floats", "tab:blue", {"atoms": "spectral", "reshape": "out", "values": "float32"}),
    Sparse("spectral, halves", "tab:blue", {"atoms": "spectral", "reshape": "out", "values": "float16"}, "--"),
    Sparse("spectral, paper's, floats", "tab:cyan", {"atoms": "spectral", "reshape": "paper", "values": "float32"}),
    Sparse("spectral, paper's, halves", "tab:cyan", {"atoms": "spectral", "reshape": "paper", "values": "float16"}, "--"),
    Sparse("Fourier", "tab:green", {"atoms": "fourier"}),
)
LEVELS = (1, 3, 7, 15, 127)
QUANTISERS = (
    *(qsgd(levels, "l2", "black", "o") for levels in LEVELS),
    *(qsgd(levels, "max", "gray", "s") for levels in LEVELS),
    Quantiser("TernGrad", "TernGrad", "tab:orange", "*", "terngrad"),
)


def measure(codec: Codec, grads: Iterable[Array], draws: int = 1) -> Point:
    """Of one code for gradients of any shape; bytes depend on what is drawn, variances do not."""
    shares, variances = [], []
    for batch, grad in enumerate(grads):
        encoded = [codec.encode(grad, kernels.derive_key(batch, draw)) for draw in range(draws)]
        shares += [payload.size / grad.nbytes for payload, _ in encoded]
        variances.append(encoded[0].noise / kernels.sum_of_squares(grad.reshape(-1)))
    return Point(float(np.mean(shares)), float(np.median(variances)), min(variances), max(variances))


def measured_over_expected(codec: Codec, grad: Array) -> str:
    """The mean squared error of some draws, over what it is expected to be, and its standard error."""
    errors, noise = [], 0.0
    for key in range(CHECKED_DRAWS):
        payload, noise = codec.encode(grad, kernels.derive_key(key))
        error = -grad
        codec.decode_add(payload, error)
        errors.append(kernels.sum_of_squares(error))
    return f"{np.mean(errors) / noise:.2f} ± {np.std(errors, ddof=1) / noise / math.sqrt(CHECKED_DRAWS):.2f}"


def ratio_for(atoms: Sparse, layout: Layout, share: float) -> float:
    """The budget with which a model's payload is expected to have this share of its bytes."""
    low, high = 1e-6, 1.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        expected = atoms.codec(layout, middle).expected_bytes((layout.size,))
        low, high = (middle, high) if expected <= share * 4 * layout.size else (low, middle)
    return low


@dataclass
class Figures:
    """All codes of a model's gradients at one stage."""

    stage: Stage
    atoms: dict[str, list[Point]]  # at RATIOS
    quantisers: dict[str, Point]
    same_bytes: dict[str, dict[str, Point]]  # by quantiser and atoms
    checks: dict[str, str]


def figures_of(stage: Stage, ratios: Iterable[float], draws: int, quantisers: Iterable[Quantiser] = QUANTISERS) -> Figures:
    layout, grads = stage.layout, stage.grads
    atoms = {one.title: [measure(one.codec(layout, ratio), grads, draws) for ratio in ratios] for one in ATOMS}
    of_quantisers = {one.title: measure(one.codec(layout), grads) for one in quantisers}
    same_bytes = {
        name: {one.title: measure(one.codec(layout, ratio_for(one, layout, point.share)), grads) for one in ATOMS}
        for name, point in of_quantisers.items()
    }
    checks = {one.title: measured_over_expected(one.codec(layout, CHECKED_RATIO), grads[0]) for one in ATOMS}
    checks |= {one.title: measured_over_expected(one.codec(layout), grads[0]) for one in quantisers}
    return Figures(stage, atoms, of_quantisers, same_bytes, checks)


def right_aligned(title: str, names: Iterable[str]) -> Table:
    """A table whose first column alone is text."""
    table = Table(title=title)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    return table


def batches(stage: Stage) -> str:
    return f"{len(stage.grads)} batch{'es' * (len(stage.grads) > 1)}"


def number(variance: float) -> str:
    return f"{variance:.3g}"


def report_variance(figures: Figures, ratios: Iterable[float], console: Console) -> None:
    stage = figures.stage
    size = f"{stage.layout.size:,} parameters, {batches(stage)}"
    table = right_aligned(
        f"{stage.title}: variance of atoms by bytes; {size}", ["atoms", *(f"{r:.0%}" for r in ratios), "measured"]
    )
    best = [min(points, key=lambda point: point.variance) for points in zip(*figures.atoms.values())]
    for name, points in figures.atoms.items():
        cells = (f"{number(point.variance)} ({point.share:.1%})" for point in points)
        marked = (f"[bold]{cell}[/bold]" if point is least else cell for cell, point, least in zip(cells, points, best))
        table.add_row(name, *marked, figures.checks[name])
    console.print(table)
    names = ["quantiser", "bytes", "measured", "variance", *figures.atoms]
    table = right_aligned(f"{stage.title}: variance of quantisers, and of atoms with the same bytes; {size}", names)
    for name, own in figures.quantisers.items():
        points = [own, *figures.same_bytes[name].values()]
        least = min(point.variance for point in points)
        cells = (f"[bold]{number(p.variance)}[/bold]" if p.variance == least else number(p.variance) for p in points)
        table.add_row(name, f"{own.share:.1%}", figures.checks[name], *cells)
    console.print(table)


@dataclass(frozen=True)
class Reshaped:
    """One tensor of two dimensions or more, by both reshapes and by its entries; all figures are medians over batches."""

    name: str
    out: tuple[int, int]
    paper: tuple[int, int]
    energy: float  # share of ||g||^2
    variances: dict[float, tuple[float, float]]  # at each of RESHAPE_RATIOS: of out, of paper
    criterion: float
    same_floats: float  # variance of spectral atoms over that of entries
    same_bytes: float

    def worse(self) -> list[float]:
        """Variance of paper's over out's, at each of RESHAPE_RATIOS."""
        return [quotient(paper, out) for out, paper in self.variances.values()]


def quotient(a: float, b: float) -> float:
    return a / b if b else (1.0 if a == 0 else math.inf)


def reshaped(stage: Stage, name: str, ratio: float) -> Reshaped:
    """`ratio` is that of the bytes with which entries are compared."""
    grads = stage.tensors(name)
    shape = grads[0].shape
    m, n = Spectral(reshape="out").matrix(shape)

    def variance(codec: Codec) -> float:
        return measure(codec, grads).variance

    def of_reshapes(r: float) -> tuple[float, float]:
        return variance(Spectral(r, "ratio", reshape="out")), variance(Spectral(r, "ratio", reshape="paper"))

    energies = [np.square(own).sum() / np.square(whole).sum() for own, whole in zip(grads, stage.grads)]
    matrices = [grad.reshape(m, n).astype(np.float64) for grad in grads]
    criteria = [math.sqrt(m + n) * np.linalg.norm(x, "nuc") / np.abs(x).sum() for x in matrices]
    return Reshaped(
        name,
        (m, n),
        Spectral(reshape="paper").matrix(shape),
        float(np.median(energies)),
        {r: of_reshapes(r) for r in RESHAPE_RATIOS},
        float(np.median(criteria)),
        quotient(variance(Spectral(1)), variance(Entrywise(m + n))),
        quotient(variance(Spectral(ratio, "ratio")), variance(Entrywise(ratio, "ratio"))),
    )


def reshapes_of(stage: Stage, ratio: float) -> list[Reshaped]:
    names = [name for name, shape in zip(stage.layout.names, stage.layout.shapes) if len(shape) > 1]
    return [reshaped(stage, name, ratio) for name in names]


def report_reshapes(stage: Stage, rows: list[Reshaped], ratio: float, console: Console) -> None:
    names = ["tensor", "shape", "out", "paper", "energy", *(f"paper / out at {r:.0%}" for r in RESHAPE_RATIOS), "better"]
    names += ["criterion", "says", "same floats", "is", f"same bytes, {ratio:.0%}", "is"]
    table = right_aligned(f"{stage.title}: spectral atoms by tensor; medians of {batches(stage)}", names)
    shapes = dict(zip(stage.layout.names, stage.layout.shapes))
    for row in rows:
        table.add_row(
            row.name.removesuffix(".weight"),
            *("x".join(map(str, shape)) for shape in (shapes[row.name], row.out, row.paper)),
            f"{row.energy:.1%}",
            *(f"{worse:.2f}" for worse in row.worse()),
            better(row.worse()),
            *(cell for r in (row.criterion, row.same_floats, row.same_bytes) for cell in (f"{r:.2f}", kind(r))),
        )
    table.add_section()
    total = whole(rows)
    table.add_row("all", "", "", "", f"{sum(row.energy for row in rows):.1%}", *(f"{r:.2f}" for r in total), better(total))
    console.print(table)
    verdicts = [better(row.worse()) for row in rows]
    counts = ", ".join(f"{verdicts.count(which)} {which}" for which in dict.fromkeys(verdicts))
    right = [sum(kind(row.criterion) == kind(getattr(row, which)) for row in rows) for which in ("same_floats", "same_bytes")]
    console.print(
        f"{stage.title}: reshape with less variance, of {len(rows)} tensors: {counts}; of all of them together: {better(total)}. "
        f"The criterion is right of {right[0]} with the same floats, of {right[1]} with the same bytes.",
        highlight=False,
    )


def whole(rows: list[Reshaped]) -> list[float]:
    """Variance of paper's over out's, at each of RESHAPE_RATIOS, of all tensors together."""
    totals = [[sum(row.energy * row.variances[r][which] for row in rows) for which in (0, 1)] for r in RESHAPE_RATIOS]
    return [quotient(paper, out) for out, paper in totals]


def better(worse: list[float]) -> str:
    """Which reshape has less variance, at all budgets, if one has."""
    if all(abs(ratio - 1) <= ALIKE for ratio in worse):
        return "alike"
    return "out" if min(worse) >= 1 else "paper" if max(worse) <= 1 else "it depends"


def kind(ratio: float) -> str:
    """Which atoms have less variance, of spectral over entries."""
    return "spectral" if ratio <= 1 else "entries"


def plot_variance(results: list[Figures], path: Path) -> None:
    """Variance against bytes, a panel for each network and stage."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(13, 5 * rows), layout="constrained", sharex=True, squeeze=False)
    for figures, one in zip(results, axes.flat):
        plot_panel(one, figures)
        one.set(xscale="log", yscale="log", title=figures.stage.title, xlabel="payload bytes / float32 bytes")
        one.set_ylabel("E||Q(g) - g||^2 / ||g||^2, median and range")
        one.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7, handlelength=4)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_panel(axes: Axes, figures: Figures) -> None:
    for atoms in ATOMS:
        points = [point for point in figures.atoms[atoms.title] if point.variance > 0]
        axes.errorbar(*coordinates(points), fmt=atoms.style, color=atoms.color, marker=".", capsize=2, label=atoms.title)
    for family in dict.fromkeys(one.family for one in QUANTISERS):
        own = [one for one in QUANTISERS if one.family == family and one.title in figures.quantisers]
        points = coordinates([figures.quantisers[one.title] for one in own])
        axes.errorbar(*points, fmt=own[0].marker, color=own[0].color, capsize=2, label=family)


def coordinates(points: list[Point]) -> tuple[list[float], list[float], list[list[float]]]:
    """x, y and the bars below and above y."""
    bars = [[p.variance - p.low for p in points], [p.high - p.variance for p in points]]
    return [p.share for p in points], [p.variance for p in points], bars
