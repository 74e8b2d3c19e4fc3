"""Step times, bytes on the wire and time to an accuracy, over slow networks of 2, 4 and 8 hosts on this machine. As root:

    python benchmarks/training.py                                   PyTorch, the 5.7M MLP, all ranks and rates: 15 minutes
    python benchmarks/training.py --models mlp cnn lstm --frameworks pytorch keras --stock both     everything: half a day
    python benchmarks/training.py --ranks 4 --rates 100mbit         one start of mpirun
    python benchmarks/training.py --accuracy                        time to 88 % on Fashion-MNIST

Methods take turns in one start of mpirun: what is compared was measured in one run. A row has the median over turns and their
range. Bytes are counted at the NIC, frame headers included, and Horovod's chatter taken off. The floor is what the network
leaves at best: computing alone, and then the method's own bytes at the full rate. "plan" is how far off `hvdcompress plan`
would have been, told the network and the computing that were measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "netlab"))

import matplotlib
import numpy as np
from lab import Lab, bits_per_second
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from training_job import BATCH, COMPUTE, MODELS, WORDS, fetch

from hvdcompress.command.plan import METHODS, Network, costs

TITLES = {
    COMPUTE: "computing alone",
    "none": "dense",
    "fp16": "fp16",
    "dore": "DORE",
    "sketch:momentum=0": "Sketched-SGD",
    "atomo": "ATOMO, spectral",
    "atomo:budget=12": "ATOMO, spectral, 12 atoms",
    "qsgd": "QSGD",
    "topk": "top-k",
}
RATES = ("100mbit", "1gbit", "unlimited")

# Learning rate and momentum, for the small MLP and 4 ranks. They came to 88 % of the validation images within 20 steps of the
# soonest of the few that were tried, by factors of two, with another seed (`training_job.py accuracy --unseen validation
# --seeds 9`); fp16 has dense's.
TUNED = {
    "none": (0.05, 0.9),
    "fp16": (0.05, 0.9),
    "dore": (0.025, 0.9),
    "sketch:momentum=0": (0.4, 0.0),
    "atomo:budget=12": (0.05, 0.9),
}


class Run(NamedTuple):
    """One start of mpirun."""

    framework: str
    model: str
    rate: str
    stock: bool
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.framework}-{self.model}-{self.rate}-{'stock' if self.stock else 'duplex'}-{self.ranks}"

    @property
    def title(self) -> str:
        settings = "Open MPI's own settings" if self.stock else "both ways at once"
        return f"{self.framework}, {MODELS[self.model]}, {self.ranks} ranks, {self.rate}, {settings}"


def measured(lab: Lab, run: Run, what: str, output: Path, timeout: float, *words: str) -> dict[str, Any] | None:
    """What the ranks of a run have found; None where it failed, and its last words are shown."""
    path, log = output / f"{run.name}.json", output / f"{run.name}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "training_job.py"), what, "--framework", run.framework, "--model", run.model]
    with log.open("w") as printed:
        options = {"timeout": timeout, "stock": run.stock, "output": printed}
        status = lab.mpirun(run.ranks, [*command, "--nic", "lab0", "--output", str(path.resolve()), *words], **options)
    if status or not path.exists():
        print(
            f"{run.title}: exit status {status}; {log} ends with", *log.read_text().splitlines()[-5:], sep="\n  ", file=sys.stderr
        )
        return None
    log.unlink()
    return json.loads(path.read_text())


class Row(NamedTuple):
    """A method in a run: medians over its turns, and their range."""

    seconds: float
    least: float
    most: float
    bytes: float
    floor: float  # seconds

    @classmethod
    def of(cls, figures: dict[str, Any], compute: float, rate: str) -> Row:
        seconds, sent = figures["seconds"], float(np.median(figures["bytes"]))
        floor = compute + 8 * figures.get("counted", sent) / bits_per_second(rate)
        return cls(float(np.median(seconds)), min(seconds), max(seconds), sent, floor)


def computing(result: dict[str, Any]) -> float:
    """Seconds of a step in which every rank trains by itself."""
    return float(np.median(result["methods"][COMPUTE]["seconds"]))


def rows(run: Run, result: dict[str, Any]) -> dict[str, Row]:
    return {spec: Row.of(figures, computing(result), run.rate) for spec, figures in result["methods"].items()}


def planned(run: Run, result: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by each method, as `hvdcompress plan` foretells them from the network and the computing of this run."""
    if "network" not in result:
        return {}
    methods = [spec for spec in result["methods"] if spec != COMPUTE]
    network, batch = Network(**result["network"]), BATCH * (WORDS if run.model == "lstm" else 1)
    tensors = [(name, tuple(shape)) for name, shape in result["tensors"]]
    found = costs(tensors, run.ranks, network, methods, computing(result), batch=batch)
    return {cost.method: cost.seconds for cost in found}


def table(run: Run, result: dict[str, Any], rounds: int) -> Table:
    found = rows(run, result)
    shown = Table(title=f"{run.title}; {rounds} turns", title_justify="left")
    for column in ("method", "ms a step", "range", "dense / it", "fp16 / it", "it / floor", "plan", "bytes a step", "saved"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for spec, row in found.items():
        ratio = {base: f"{found[base].seconds / row.seconds:.2f}" if base in found else "" for base in ("none", "fp16")}
        saved = f"{1 - row.bytes / found['none'].bytes:.1%}" if "none" in found and spec != COMPUTE else ""
        name = TITLES.get(spec, spec)
        spread = f"{1e3 * row.least:.1f} to {1e3 * row.most:.1f}"
        sent = "" if spec == COMPUTE else f"{row.bytes:,.0f}"
        above = "" if spec == COMPUTE else f"{row.seconds / row.floor:.2f}"
        foretold = f"{result['planned'][spec] / row.seconds - 1:+.0%}" if spec in result["planned"] else ""
        shown.add_row(name, f"{1e3 * row.seconds:.1f}", spread, ratio["none"], ratio["fp16"], above, foretold, sent, saved)
    return shown


def plot(results: dict[Run, dict[str, Any]], output: Path) -> Iterator[Path]:
    """Step times against the number of ranks: a figure for each model, framework and setting, a panel for each rate."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for framework, model, stock in dict.fromkeys((run.framework, run.model, run.stock) for run in results):
        mine = {run: rows(run, result) for run, result in results.items() if run[:2] == (framework, model) and run.stock == stock}
        rates = list(dict.fromkeys(run.rate for run in mine))
        size = (4.5 * len(rates) + 1.5, 4.2)
        figure, panels = pyplot.subplots(1, len(rates), figsize=size, layout="constrained", squeeze=False)
        for rate, axes in zip(rates, panels[0]):
            for spec in dict.fromkeys(spec for found in mine.values() for spec in found):
                points = sorted((run.ranks, found[spec]) for run, found in mine.items() if run.rate == rate and spec in found)
                heights = np.array([row.seconds for _, row in points])
                spread = np.array([[row.seconds - row.least, row.most - row.seconds] for _, row in points]).T
                style = {"linestyle": ":", "color": "black"} if spec == COMPUTE else {"marker": "o", "capsize": 3}
                axes.errorbar(
                    [ranks for ranks, _ in points], 1e3 * heights, yerr=1e3 * spread, label=TITLES.get(spec, spec), **style
                )
            axes.set(title=rate, xlabel="ranks", ylabel="ms a step (median and range)", yscale="log", xscale="log")
            axes.set_xticks(
                sorted({run.ranks for run in mine}), labels=sorted({str(run.ranks) for run in mine}, key=int), minor=False
            )
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.legend(*panels[0][-1].get_legend_handles_labels(), loc="outside right center")
        figure.suptitle(f"{MODELS[model]}, {framework}, {'Open MPI as it comes' if stock else 'both ways at once'}")
        path = output / f"steps-{framework}-{model}-{'stock' if stock else 'duplex'}.png"
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
        yield path


def time_to_accuracy(lab: Lab, args: argparse.Namespace, console: Console) -> None:
    run = Run("pytorch", args.models[0], args.rates[0], False, args.ranks[0])
    rates, momenta = zip(*(TUNED[spec] for spec in args.methods))
    words = ["--methods", *args.methods, "--lr", *map(str, rates), "--momentum", *map(str, momenta)]
    words += ["--seeds", *map(str, range(args.seeds)), "--target", str(args.target)]
    result = measured(lab, run, "accuracy", args.output, 6 * 3600, *words)
    if result is None:
        sys.exit(1)
    shown = Table(
        title=f"{run.title}: until {args.target:.0%} of the test images are right, {args.seeds} seeds", title_justify="left"
    )
    for column in ("method", "learning rate", "seconds", "range", "dense / it", "fp16 / it", "steps"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    medians = {spec: np.median([one["seconds"] or np.inf for one in runs]) for spec, runs in result.items()}
    for spec, runs in result.items():
        seconds = [one["seconds"] or np.inf for one in runs]
        ratios = [f"{medians[base] / medians[spec]:.2f}" if base in medians else "" for base in ("none", "fp16")]
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        taken = ", ".join(str(one["steps"]) for one in runs)
        shown.add_row(TITLES.get(spec, spec), f"{runs[0]['lr']:g}", f"{medians[spec]:.1f}", spread, *ratios, taken)
    console.print(shown)
    (args.output / "accuracy.json").write_text(json.dumps({"run": run._asdict(), "methods": result}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=None, help="default: mlp; small with --accuracy")
    parser.add_argument("--frameworks", nargs="+", choices=["pytorch", "keras"], default=["pytorch"])
    parser.add_argument("--ranks", nargs="+", type=int, default=None, help="default: 2 4 8; 4 with --accuracy")
    parser.add_argument("--rates", nargs="+", default=None, help="default: 100mbit 1gbit unlimited; 100mbit with --accuracy")
    parser.add_argument("--stock", choices=["no", "yes", "both"], default="no", help="Open MPI's own protocol for long messages")
    parser.add_argument("--methods", nargs="+", default=None, help="as Compression.parse takes them; default: all, or all tuned")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each method")
    parser.add_argument("--accuracy", action="store_true", help="time to an accuracy, in place of step times")
    parser.add_argument("--target", type=float, default=0.88)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks-out"))
    args = parser.parse_args()
    args.models = args.models or (["small"] if args.accuracy else ["mlp"])
    args.ranks = args.ranks or ([4] if args.accuracy else [2, 4, 8])
    args.methods = args.methods or list(TUNED if args.accuracy else METHODS)
    if args.accuracy and not TUNED.keys() >= set(args.methods):
        parser.error(f"rates are known of {', '.join(TUNED)} only")
    args.rates = args.rates or (["100mbit"] if args.accuracy else list(RATES))
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 150)
    fetch(args.models)
    lab = Lab("training")
    lab.up(max(args.ranks), args.rates[0])
    try:
        if args.accuracy:
            time_to_accuracy(lab, args, console)
        else:
            step_times(lab, args, console)
    finally:
        lab.down()


def step_times(lab: Lab, args: argparse.Namespace, console: Console) -> None:
    settings = {"no": [False], "yes": [True], "both": [False, True]}[args.stock]
    runs = [
        Run(framework, model, rate, stock, ranks)
        for framework in args.frameworks
        for model in args.models
        for stock in settings
        for rate in args.rates
        for ranks in args.ranks
    ]
    results: dict[Run, dict[str, Any]] = {}
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(runs))
        for run in runs:
            progress.update(task, description=run.name)
            lab.limit(run.rate)
            result = measured(lab, run, "steps", args.output, 1800, "--rounds", str(args.rounds), "--methods", *args.methods)
            if result is not None:
                results[run] = {**result, "planned": planned(run, result)}
                console.print(table(run, results[run], args.rounds))
            progress.advance(task)
    (args.output / "steps.json").write_text(
        json.dumps([{**run._asdict(), **result} for run, result in results.items()], indent=1)
    )
    paths = [str(path) for path in plot(results, args.output)]
    console.print(f"figures: {args.output}/steps.json, {', '.join(paths)}")
    if len(results) < len(runs):
        sys.exit(f"{len(runs) - len(results)} of {len(runs)} runs failed")


if __name__ == "__main__":
    main()
