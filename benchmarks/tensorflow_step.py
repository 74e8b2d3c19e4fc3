"""What compression costs a Keras model of many variables, beside plain Horovod, in one start.

    mpirun -np 2 python benchmarks/tensorflow_step.py --compression dore

Through shared memory there is nothing to gain: what is left is the price. Plain and compressed models take turns; the
first epoch is of a new model, so it is tracing for the most part. Prints medians and ranges, how often a step was traced,
and how the resident memory grew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import numpy as np
import psutil
import tensorflow as tf
from horovod.tensorflow.keras import DistributedOptimizer
from rich.console import Console
from rich.table import Table

import hvdcompress.tensorflow as hvc
from hvdcompress.keras import CompressionCallback
from hvdcompress.tensorflow.reduction import Reduction

keras = tf.keras
BATCH, FEATURES = 8, 64
RUNS = itertools.count()


def layers_model(layers: int) -> Any:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(FEATURES, "relu") for _ in range(layers - 1)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(10)])


def data(steps: int, rest: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank())
    size = BATCH * steps + rest
    return rng.normal(size=(size, FEATURES)).astype(np.float32), rng.integers(0, 10, size)


class Traced:
    """Counts how often a step is built."""

    def __init__(self) -> None:
        self.count, build = 0, Reduction.build

        def counted(reduction: Reduction, *args: Any) -> Any:
            self.count += 1
            return build(reduction, *args)

        Reduction.build = counted  # type: ignore[method-assign]


def measure(compression: Any, layers: int, steps: int) -> dict[str, float]:
    """Seconds of the first epoch, and of a step in a later one."""
    model = layers_model(layers)
    # Horovod keeps what it has traced by the name, too: without one, a second model of the same shapes would not be traced.
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.01), name=f"run{next(RUNS)}", compression=compression)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = [CompressionCallback()] if isinstance(compression, hvc.Compressor) else []
    began = time.perf_counter()
    model.fit(*data(10, rest=BATCH // 2), batch_size=BATCH, verbose=0, callbacks=callbacks)
    first, began = time.perf_counter() - began, time.perf_counter()
    model.fit(*data(steps), batch_size=BATCH, verbose=0, callbacks=callbacks)
    return {"first epoch": first, "step": (time.perf_counter() - began) / steps}


def grown(compression: Any, layers: int, steps: int) -> dict[str, float]:
    """MiB of resident memory after a tenth of the steps, and what came to it in the others; traces in the others."""
    traced, model = Traced(), layers_model(layers)
    model.compile(
        DistributedOptimizer(keras.optimizers.SGD(0.01), compression=compression),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    callbacks, process = [CompressionCallback()], psutil.Process()
    model.fit(*data(steps // 10, rest=BATCH // 2), batch_size=BATCH, verbose=0, callbacks=callbacks)
    before, traces = process.memory_info().rss, traced.count
    x, y = data(steps // 10, rest=BATCH // 2)
    model.fit(x, y, batch_size=BATCH, epochs=9, verbose=0, callbacks=callbacks)
    after = process.memory_info().rss
    return {"MiB": before / 2**20, "grown": (after - before) / 2**20, "traces": traced.count - traces}


def report(runs: dict[str, list[dict[str, float]]], variables: int, memory: dict[str, float] | None, steps: int) -> None:
    (_, plain), (_, compressed) = runs.items()
    table = Table(title=f"{variables} variables, {hvd.size()} ranks, {len(plain)} times in turn; median (range)")
    for column in ("", *runs, "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, unit, scale in (("first epoch", "s", 1.0), ("step", "ms", 1e3)):
        values = [scale * np.array([run[name] for run in seen]) for seen in (plain, compressed)]
        shown = [f"{np.median(v):.1f} ({v.min():.1f} to {v.max():.1f}) {unit}" for v in values]
        table.add_row(name, *shown, f"{np.median(values[1]) / np.median(values[0]):.2f}")
    console = Console(width=120)
    console.print(table)
    if memory:
        console.print(
            f"memory: {memory['MiB']:.0f} MiB, and {memory['grown']:+.1f} MiB after {steps * 9 // 10:,} more steps, in which "
            f"{memory['traces']:.0f} were traced"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", default="dore", help="a method with options")
    parser.add_argument("--layers", type=int, default=80, help="two variables each")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch that is timed")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print figures for a program to read")
    parser.add_argument("--memory-steps", type=int, default=2000, help="0: memory is not looked at")
    args = parser.parse_args()

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # one thread a rank: the ranks share this machine's cores
    tf.config.threading.set_inter_op_parallelism_threads(1)
    runs: dict[str, list[dict[str, float]]] = {"none": [], args.compression: []}
    for _ in range(args.repeat):
        for text, seen in runs.items():
            seen.append(measure(hvc.Compression.parse(text), args.layers, args.steps))
    memory = grown(hvc.Compression.parse(args.compression), args.layers, args.memory_steps) if args.memory_steps else None
    if hvd.rank() == 0 and args.json:
        print(json.dumps({"plain": runs["none"], "compressed": runs[args.compression], "memory": memory}), flush=True)
    elif hvd.rank() == 0:
        report(runs, 2 * args.layers, memory, args.memory_steps)


if __name__ == "__main__":
    main()
