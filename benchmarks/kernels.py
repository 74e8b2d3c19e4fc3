"""Times the compiled kernels against a memcpy of the same floats, and beside the same in NumPy and in PyTorch operations.

    python benchmarks/kernels.py [--json] [--elements 25000000] [--isa avx2] [--no-others]

One thread; memory touched and warm before anything is timed; medians, with the quartiles as spread. All of a run is timed in
one process, so the ratios can be compared; the milliseconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

for variable in ("OMP_NUM_THREADS", "HVDCOMPRESS_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hvdcompress.kernels import _native as native
from hvdcompress.kernels import derive_key
from hvdcompress.kernels import numpy as definition

ROWS, COLUMNS, TILE = 5, 499_968, 256
BLOCK = 256
LEVELS = 7  # 4 bits
SHARE = 1000  # top 1 / SHARE

Timed = dict[str, Callable[[], Any]]


def times_ms(run: Callable[[], Any], repetitions: int) -> list[float]:
    """Ascending; one run before them is not counted."""
    run()
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


def compiled_or_numpy(kernels: Any, x: np.ndarray, out: np.ndarray) -> Timed:
    keys = [derive_key(1, row) for row in range(ROWS)]
    table = np.zeros((ROWS, COLUMNS), np.float32)
    payload, levels = native.ternary_encode(x, BLOCK, 1, 0, False)[0], native.levels_encode(x, BLOCK, LEVELS, 1, 0, False)
    return {
        "sketch_accumulate": lambda: kernels.sketch_accumulate(x, 0, table, TILE, keys),
        "sketch_estimate": lambda: kernels.sketch_estimate(x.size, 0, table, TILE, keys),
        "ternary_encode": lambda: kernels.ternary_encode(x, BLOCK, 1, 0, False),
        "ternary_decode_add": lambda: kernels.ternary_decode_add(payload, out, BLOCK, 0.5, False),
        "levels_encode": lambda: kernels.levels_encode(x, BLOCK, LEVELS, 1, 0, False),
        "levels_decode_add": lambda: kernels.levels_decode_add(levels, out, BLOCK, LEVELS, 0.5),
        "top_k": lambda: kernels.top_k(x, x.size // SHARE),
    }


def pytorch(x: np.ndarray, out: np.ndarray) -> Timed:
    """The same operations as one writes them with PyTorch: hash tables kept, codes packed four to a byte."""
    n, whole = x.size, x.size - x.size % (4 * BLOCK)
    x_, out_ = torch.from_numpy(x), torch.from_numpy(out)
    generator = torch.Generator().manual_seed(0)
    buckets = torch.randint(0, COLUMNS, (ROWS, n), generator=generator)
    signs = torch.randint(0, 2, (ROWS, n), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    table = torch.zeros(ROWS, COLUMNS)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)

    def accumulate() -> None:
        for row in range(ROWS):
            table[row].index_add_(0, buckets[row], x_ * signs[row])

    def estimate() -> torch.Tensor:
        return torch.stack([table[row][buckets[row]] * signs[row] for row in range(ROWS)]).median(dim=0).values

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x_[:whole].view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True)
        chosen = torch.rand(blocks.shape, generator=generator) * scales < blocks.abs()
        codes = torch.where(chosen, torch.where(blocks < 0, 2, 1), 0).to(torch.uint8).view(-1, 4)
        return scales, (codes << shifts).sum(dim=1, dtype=torch.uint8)

    scales, packed = encode()

    def decode_add() -> None:
        codes = (packed[:, None] >> shifts) & 3
        values = (codes & 1).to(torch.float32) - (codes >> 1).to(torch.float32)
        out_[:whole].add_((values.view(-1, BLOCK) * scales).view(-1), alpha=0.5)

    return {
        "sketch_accumulate": accumulate,
        "sketch_estimate": estimate,
        "ternary_encode": encode,
        "ternary_decode_add": decode_add,
        "top_k": lambda: torch.topk(x_.abs(), n // SHARE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--isa", choices=native.instruction_sets(), default=native.instruction_set())
    parser.add_argument("--no-others", action="store_true", help="leave NumPy and PyTorch out")
    args = parser.parse_args()

    torch.set_num_threads(1)
    native.choose(args.isa)
    x = np.random.default_rng(0).normal(size=args.elements).astype(np.float32)
    out = np.zeros_like(x)
    out += 1
    memcpy = times_ms(lambda: np.copyto(out, x), 3 * args.repetitions)
    memcpy_ms = memcpy[len(memcpy) // 2]
    sets = {"": compiled_or_numpy(native, x, out)}
    if not args.no_others:
        sets |= {"numpy_": compiled_or_numpy(definition, x, out), "pytorch_": pytorch(x, out)}
    kernels: dict[str, dict[str, float]] = {}
    for prefix, operations in sets.items():
        for name, run in operations.items():
            times = times_ms(run, args.repetitions)
            row = kernels.setdefault(name, {})
            row[f"{prefix}ms"] = times[len(times) // 2]
            row[f"{prefix}per_memcpy"] = times[len(times) // 2] / memcpy_ms
            if not prefix:
                row["quartiles_ms"] = [times[len(times) // 4], times[-1 - len(times) // 4]]
    result = {
        "memcpy_ms": memcpy_ms,
        "elements": args.elements,
        "repetitions": args.repetitions,
        "instruction_set": native.instruction_set(),
        "kernels": kernels,
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    table = Table(
        title=f"{args.elements:,} floats, {native.instruction_set()}, one thread, medians of {args.repetitions}; "
        f"memcpy {memcpy_ms:.1f} ms; the rest in units of it"
    )
    for column in ("kernel", "ms", "quartiles", "compiled", "NumPy", "PyTorch operations"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for name, row in kernels.items():
        others = [f"{row[key]:.1f}" if key in row else "" for key in ("numpy_per_memcpy", "pytorch_per_memcpy")]
        low, high = row["quartiles_ms"]
        table.add_row(name, f"{row['ms']:.1f}", f"{low:.1f} to {high:.1f}", f"{row['per_memcpy']:.2f}", *others)
    Console().print(table)


if __name__ == "__main__":
    main()
