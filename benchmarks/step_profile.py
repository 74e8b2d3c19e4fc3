"""Where the milliseconds of a DORE step go, on the first rank: its own parts, and the network's. In the lab, as root:

    python benchmarks/step_profile.py --rates 100mbit unlimited

Parts of the rank are timed around the functions that do them, by the clock and by the processor's; what the network does is
Horovod's own timeline of the same steps. The clock runs on while other ranks have the processor: here they share two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "netlab"))

STEPS, WARM_UP = 30, 5
PARTS = ("copy in", "encode", "wait", "decode", "copy out", "optimizer", "forward and backward")


class Clock:
    """Seconds by the clock and of the processor, by the part; a part inside another one is taken off it."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._inside: list[list[float]] = []

    def of(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter(), time.thread_time()
            self._inside.append([0.0, 0.0])
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - began[0], time.thread_time() - began[1]
                inside = self._inside.pop()
                for i in (0, 1):
                    self.seconds[part][i] += took[i] - inside[i]
                    if self._inside:
                        self._inside[-1][i] += took[i]

        return timed


def profile(output: Path, timeline: Path) -> None:
    """What a rank does."""
    from training_job import BATCH, PyTorch

    import hvdcompress.drivers.torch as driver
    import hvdcompress.torch.compressor as adapter
    from hvdcompress.session import Session

    clock = Clock()
    for owner, name, part in (
        (adapter.Compressor, "_take", "copy in"),
        (Session, "start", "encode"),
        (Session, "advance", "decode"),
        (Session, "finish", "decode"),
        (driver.Transport, "wait", "wait"),
        (driver.Transport, "earlier", "wait"),
        (adapter.Compressor, "decompress", "copy out"),
    ):
        setattr(owner, name, clock.of(part, getattr(owner, name)))
    framework = PyTorch("mlp")
    loss, model = framework.torch.nn.functional.cross_entropy, framework.model()
    optimizer, _ = framework.wrapped(model, "dore", 0.01, 0.0)
    x, y = framework.inputs[:BATCH], framework.targets[:BATCH]

    def backward() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()

    compute, step = clock.of("forward and backward", backward), clock.of("optimizer", optimizer.step)
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            framework.mean(0.0)
            clock.seconds.clear()
            if framework.hvd.rank() == 0:
                framework.hvd.start_timeline(str(timeline))
            began = time.perf_counter()
        compute()
        step()
    took = (time.perf_counter() - began) / STEPS
    if framework.hvd.rank() == 0:
        framework.hvd.stop_timeline()
        parts = {part: [1e3 * seconds / STEPS for seconds in clock.seconds[part]] for part in PARTS}
        output.write_text(json.dumps({"step": 1e3 * took, "parts": parts}))
    framework.mean(0.0)


def network(timeline: Path) -> dict[str, float]:
    """Milliseconds a step in which MPI was moving bytes, and in which something had been submitted and was not moved yet."""
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    opened: dict[int, list[tuple[str, float]]] = defaultdict(list)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "B":
            opened[event["pid"]].append((event["name"], event["ts"]))
        elif event.get("ph") == "E" and opened[event["pid"]]:
            name, began = opened[event["pid"]].pop()
            kind = "wire" if name.startswith("MPI_") else "negotiation" if name.startswith("NEGOTIATE") else ""
            spans[kind].append((began, event["ts"]))
    wire = _union(spans["wire"])
    either = _union(spans["wire"] + spans["negotiation"])
    return {"wire": wire / 1e3 / STEPS, "negotiation, and waiting for other ranks": (either - wire) / 1e3 / STEPS}


def _union(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "unlimited"])
    parser.add_argument("--output", type=Path, default=Path("benchmarks-out"))
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    figures, timeline = (args.output.resolve() / name for name in ("profile.json", "timeline.json"))
    if args.rank:
        profile(figures, timeline)
        return
    from lab import Lab
    from rich.console import Console
    from rich.table import Table

    args.output.mkdir(parents=True, exist_ok=True)
    lab, shown = Lab("profile"), Table("ms a step", title=f"DORE, MLP of 5.7M parameters, {args.ranks} ranks; {STEPS} steps")
    found = []
    lab.up(args.ranks, args.rates[0])
    try:
        for rate in args.rates:
            lab.limit(rate)
            words = [sys.executable, str(HERE / "step_profile.py"), "--rank", "--output", str(args.output)]
            if lab.mpirun(args.ranks, words, timeout=300, environment={"HOROVOD_TIMELINE": "DYNAMIC"}):
                sys.exit(f"the ranks have failed at {rate}")
            found.append({**json.loads(figures.read_text()), "network": network(timeline)})
    finally:
        lab.down()
    for rate in args.rates:
        shown.add_column(f"{rate}, by the clock", justify="right")
        shown.add_column("of the processor", justify="right")
    for part in PARTS:
        shown.add_row(part, *(f"{value:.1f}" for one in found for value in one["parts"][part]))
    shown.add_row("the step", *(word for one in found for word in (f"{one['step']:.1f}", "")), end_section=True)
    for name in found[0]["network"]:
        shown.add_row(name, *(word for one in found for word in (f"{one['network'][name]:.1f}", "")))
    Console(width=None if sys.stdout.isatty() else 130).print(shown)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
