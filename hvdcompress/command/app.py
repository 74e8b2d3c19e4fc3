"""The commands, and how what they find is shown."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from .. import __version__
from . import plan as planning
from .models import BATCH, NAMED, Tensors, elements, tensors_of

MODEL = f"The model: {', '.join(NAMED)}; or shapes such as 1000x784,1000; or module:function, which makes a PyTorch model."
EXAMPLES = "Examples of a rank and step (of sequences, words): the gradient of a dense layer has no higher rank."
METHODS = "Methods, as Compression.parse takes them; may be given several times."
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def bandwidth(text: str) -> float:
    """Bits a second of "100mbit", "25gbit".

    >>> bandwidth("2.5gbit")
    2500000000.0
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)(?:b(?:it)?)?(?:/s|ps)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{text!r} is no bandwidth: write 100mbit or 2.5gbit")
    return float(match[1]) * UNITS[match[2]]


class Model(click.ParamType):  # type: ignore[type-arg]
    name = "model"

    def convert(self, value: Any, param: Any, ctx: Any) -> Tensors:
        try:
            return tensors_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def app() -> None:
    """Gradient compression for Horovod: is everything there, what does it cost here, and is it worth it?"""


@app.command(context_settings={"ignore_unknown_options": True})
@click.option("-np", "--ranks", default=2, show_default=True, help="Ranks to start.")
@click.argument("launcher", nargs=-1, type=click.UNPROCESSED)
def doctor(ranks: int, launcher: tuple[str, ...]) -> None:
    """Looks at Horovod, MPI and the ranks' versions; what is no good says what to do.

    LAUNCHER: after --, further words for mpirun, such as --hostfile hosts.
    """
    from .doctor import findings

    console, bad = Console(), 0
    with console.status("looking"):
        for finding in findings(ranks, launcher):
            mark = {True: "[green]ok[/]", False: "[red]NO[/]", None: "--"}[finding.good]
            console.print(f"{mark:<14} [bold]{escape(finding.what)}[/]: {escape(finding.found)}", highlight=False)
            if finding.good is False:
                bad += 1
                console.print(f"     {escape(finding.remedy)}", highlight=False)
    sys.exit(1 if bad else 0)


@app.command()
@click.option("--model", "tensors", type=Model(), default="mlp", show_default=True, help=MODEL)
@click.option("--method", "methods", multiple=True, default=planning.METHODS, help=METHODS)
@click.option("--batch", default=BATCH, show_default=True, type=click.IntRange(1), help=EXAMPLES)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Steps of each method, after one.")
@click.option("--output", type=click.Path(path_type=Path), help="A file for the figures, as JSON, for `plan --bench`.")
def bench(tensors: Tensors, methods: tuple[str, ...], batch: int, repeats: int, output: Path | None) -> None:
    """Measures the network, the arithmetic and a step of each method. Start it as the training would be:

    mpirun -np 4 --hostfile hosts hvdcompress bench --model resnet50 --output bench.json
    """
    from .bench import Ranks

    try:
        ranks = Ranks()
    except ImportError as error:
        raise click.ClickException(f"bench needs Horovod with PyTorch: {error}; `hvdcompress doctor` says more") from error
    if ranks.size == 1:
        raise click.ClickException("with one rank there is nothing to exchange: start it with mpirun -np 2 or more")
    console = Console(quiet=ranks.rank != 0)
    total = len(methods) * (1 + repeats)
    with _progress(console) as progress:
        task = progress.add_task("network", total=total + 1)
        network = ranks.network()
        kernels = ranks.kernels()
        progress.advance(task)

        def on_each(method: str) -> None:
            progress.update(task, description=method, advance=1)

        try:
            steps = ranks.steps(tensors, methods, repeats, on_each, batch)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    if ranks.rank:
        return
    console.print(
        f"{ranks.size} ranks, {elements(tensors):,} parameters in {len(tensors)} tensors; nothing computed but the exchange"
    )
    _print_network(console, network)
    for name, seconds in kernels.items():
        console.print(f"{name}: {4e-9 / seconds:.2f} GB of gradients a second, while every rank computes", highlight=False)
    shown = Table("method", *_right("step ms", "range", "dense / it", "bytes sent"))
    base = statistics.median(steps["none"]["seconds"]) if "none" in steps else None
    for method, one in steps.items():
        middle = statistics.median(one["seconds"])
        spread = f"{1e3 * min(one['seconds']):.1f} to {1e3 * max(one['seconds']):.1f}"
        faster = f"{base / middle:.2f}" if base else ""
        sent = f"{one['bytes']:,.0f}" if one["bytes"] else ""
        shown.add_row(escape(method), f"{1e3 * middle:.1f}", spread, faster, sent)
    console.print(shown)
    if output is not None:
        figures = {
            "ranks": ranks.size,
            "elements": elements(tensors),
            "network": vars(network),
            "kernels": kernels,
            "methods": steps,
        }
        output.write_text(json.dumps(figures, indent=1))
        console.print(f"`hvdcompress plan --bench {output}` says what to take", highlight=False)


@app.command()
@click.option("--model", "tensors", type=Model(), default="mlp", show_default=True, help=MODEL)
@click.option("--method", "methods", multiple=True, default=planning.METHODS, help=METHODS)
@click.option("--batch", default=BATCH, show_default=True, type=click.IntRange(1), help=EXAMPLES)
@click.option("-np", "--ranks", type=click.IntRange(2), help="Ranks. Default: those of --bench, or 4.")
@click.option("--bandwidth", "rate", help="Between the hosts, each way: 100mbit, 10gbit.")
@click.option("--bench", "measured", type=click.Path(exists=True, path_type=Path), help="What `bench --output` has written.")
@click.option("--compute-ms", default=0.0, show_default=True, help="Milliseconds of a step without any exchange.")
@click.option("--ranks-per-core", default=1.0, show_default=True, help="More than 1 where ranks share processors.")
def plan(
    tensors: Tensors,
    methods: tuple[str, ...],
    batch: int,
    ranks: int | None,
    rate: str | None,
    measured: Path | None,
    compute_ms: float,
    ranks_per_core: float,
) -> None:
    """Predicts bytes and time of a step by each method, and says what to take, or not to compress.

    Arithmetic is measured here, on random gradients of the model's sizes. The network is what --bandwidth or --bench says.
    """
    if (rate is None) == (measured is None):
        raise click.UsageError("give --bandwidth, such as 10gbit, or --bench, a file of `hvdcompress bench --output`")
    if measured is not None:
        figures = json.loads(measured.read_text())
        network, ranks = planning.Network(**figures["network"]), ranks or int(figures["ranks"])
    else:
        network, ranks = planning.Network.of_rate(bandwidth(rate or ""), contention=ranks_per_core), ranks or 4
    console = Console()
    with _progress(console) as progress:
        task = progress.add_task("", total=len(methods))

        def on_each(method: str) -> None:
            progress.update(task, description=method, advance=1)

        try:
            found = planning.costs(tensors, ranks, network, methods, compute_ms / 1e3, on_each, batch)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    console.print(f"{ranks} ranks, {elements(tensors):,} parameters in {len(tensors)} tensors")
    _print_network(console, network)
    shown = Table("method", *_right("bytes sent", "wire ms", "codec ms", "rounds", "step ms", "dense / it"))
    base = next((cost.seconds for cost in found if cost.method == "none"), None)
    for cost in sorted(found, key=lambda cost: cost.seconds):
        times = (f"{1e3 * seconds:.1f}" for seconds in (cost.wire, cost.arithmetic * network.contention))
        faster = f"{base / cost.seconds:.2f}" if base else ""
        shown.add_row(escape(cost.method), f"{cost.bytes:,.0f}", *times, str(cost.rounds), f"{1e3 * cost.seconds:.1f}", faster)
    console.print(shown)
    console.print(verdict(planning.advice(found)), highlight=False)


def verdict(advice: planning.Advice) -> str:
    """A line."""
    plain, best = advice.plain, advice.best
    if not advice.compress:
        names = {"none": "Horovod as it is", "fp16": "Horovod's own Compression.fp16"}
        fallback = names[plain.method] if plain else best.method
        return f"[bold]Do not compress[/]: {fallback} is as fast here, or faster."
    gain = f", {plain.seconds / best.seconds:.1f} times faster than {plain.method}" if plain else ""
    tune = "Every method has a learning rate of its own: tune it."
    return f"[bold]Take {escape(best.method)}[/]: {1e3 * best.seconds:.1f} ms a step{gain}. {tune}"


def _print_network(console: Console, network: planning.Network) -> None:
    rates = ", ".join(f"{name} {8e-6 * getattr(network, name):,.0f} Mbit/s" for name in ("allreduce", "exchange"))
    console.print(
        f"network: {rates}; latency {1e3 * network.latency:.1f} ms; arithmetic takes {network.contention:.1f} times its own time",
        highlight=False,
    )


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _progress(console: Console) -> Progress:
    return Progress(TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True)
