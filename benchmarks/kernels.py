"""Times every codec, and the count sketch: encode, and decode and add, beside the same in NumPy and in PyTorch operations.

    python benchmarks/kernels.py [--json] [--elements 10000000] [--isa avx2] [--no-others]

A payload and its noise figure are made as a step makes them. PyTorch's are the same operations as one writes them with it: draws
of its generator, codes packed into bytes. One thread; memory touched and warm before anything is timed; medians, with the
quartiles as spread. All of a run is timed in one process, so the ratios can be compared; the milliseconds are this machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

for variable in ("OMP_NUM_THREADS", "HVDCOMPRESS_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hvdcompress import codecs, kernels
from hvdcompress.command.models import gradient
from hvdcompress.kernels import _native as native
from hvdcompress.kernels import numpy as definition
from hvdcompress.sketch import CountSketch

ROWS, COLUMNS, TILE = 5, 499_968, 256
SIDE = 1000  # of the matrix that is taken apart
SMALL = 1_000_000  # elements at most, of what takes long
GENERATOR = torch.Generator().manual_seed(0)

Timed = Callable[[], Any]


class Pair(NamedTuple):
    """To encode, and to decode and add."""

    encode: Timed
    decode_add: Timed


class Case(NamedTuple):
    """One codec on one input."""

    name: str
    x: np.ndarray
    codec: Any
    pytorch: Callable[[torch.Tensor, torch.Tensor], Pair]  # of x and of what is added to

    def ours(self) -> Pair:
        out = np.zeros_like(self.x)
        if isinstance(self.codec, CountSketch):
            table = np.zeros((ROWS, COLUMNS), np.float32)
            return Pair(lambda: self.codec.add(self.x, 0, table), lambda: self.codec.estimate(table, self.x.size))
        payload = self.codec.encode(self.x, 1).payload
        return Pair(lambda: self.codec.encode(self.x, 1), lambda: self.codec.decode_add(payload, out, 0.5))


# With PyTorch's operations


def packed(bits: torch.Tensor) -> torch.Tensor:
    """bool[8 n] as uint8[n]."""
    return (bits.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpacked(payload: torch.Tensor) -> torch.Tensor:
    return ((payload[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).bool().view(-1)


def draws(like: torch.Tensor) -> torch.Tensor:
    return torch.rand(like.shape, generator=GENERATOR)


def with_ternary(block: int) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    """Two bits an element, four elements to a byte."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)

    def pair(x: torch.Tensor, out: torch.Tensor) -> Pair:
        def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            blocks, sizes = x.view(-1, block), x.view(-1, block).abs()
            scales = sizes.amax(1, keepdim=True)
            chosen = draws(blocks).mul_(scales) < sizes
            codes = torch.where(chosen, torch.where(blocks < 0, 2, 1), 0).to(torch.uint8).view(-1, 4)
            noise = (sizes.sum(1) * scales[:, 0]).sum() - torch.dot(x, x)
            return scales, (codes << shifts).sum(1, dtype=torch.uint8), noise

        scales, codes, _ = encode()

        def decode_add() -> None:
            each = (codes[:, None] >> shifts) & 3
            values = (each & 1).float() - (each >> 1).float()
            out.add_((values.view(-1, block) * scales).view(-1), alpha=0.5)

        return Pair(encode, decode_add)

    return pair


def with_levels(levels: int, block: int) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    """Four bits an element, two elements to a byte."""
    shifts = torch.tensor([0, 4], dtype=torch.uint8)

    def pair(x: torch.Tensor, out: torch.Tensor) -> Pair:
        def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            blocks = x.view(-1, block)
            norms = blocks.norm(dim=1, keepdim=True)
            place = blocks.abs() * (levels / norms)
            low = place.floor()
            part = place - low
            whole = low + (draws(blocks) < part)
            codes = (whole * blocks.sign() + levels).to(torch.uint8).view(-1, 2)
            noise = ((part * (1 - part)).sum(1) * (norms[:, 0] / levels).square()).sum()
            return norms, (codes << shifts).sum(1, dtype=torch.uint8), noise

        norms, codes, _ = encode()

        def decode_add() -> None:
            each = ((codes[:, None] >> shifts) & 15).float() - levels
            out.add_((each.view(-1, block) * (norms / levels)).view(-1), alpha=0.5)

        return Pair(encode, decode_add)

    return pair


def with_top_k(ratio: float) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    """Places as int32."""

    def pair(x: torch.Tensor, out: torch.Tensor) -> Pair:
        k = round(ratio * x.numel())

        def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            places = x.abs().topk(k, sorted=False).indices
            values = x[places]
            return places.to(torch.int32), values, torch.dot(x, x) - torch.dot(values, values)

        places, values, _ = encode()
        return Pair(encode, lambda: out.index_add_(0, places, values, alpha=0.5))

    return pair


def with_copy(x: torch.Tensor, out: torch.Tensor) -> Pair:
    payload = x.clone()
    return Pair(x.clone, lambda: out.add_(payload, alpha=0.5))


def with_entries(x: torch.Tensor, out: torch.Tensor) -> Pair:
    """Entries that are drawn in proportion to their size, as a mask, signs and one value."""
    budget = 3.0

    def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = x.abs()
        level = sizes.sum() / budget
        chosen = draws(x) * level < sizes
        return level, packed(chosen), x[chosen] < 0

    level, mask, negative = encode()

    def decode_add() -> None:
        places = unpacked(mask).nonzero()[:, 0]
        out.index_add_(0, places, torch.where(negative, -level, level), alpha=0.5)

    return Pair(encode, decode_add)


def with_fourier(x: torch.Tensor, out: torch.Tensor) -> Pair:
    """Coefficients of a real transform that are drawn in proportion to their size."""

    def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spectrum = torch.fft.rfft(x, norm="ortho")
        sizes = spectrum.abs()
        level = sizes.sum() / 3.0
        places = (draws(sizes) * level < sizes).nonzero()[:, 0]
        return level, places, spectrum[places]

    level, places, values = encode()

    def decode_add() -> None:
        spectrum = torch.zeros(x.numel() // 2 + 1, dtype=torch.complex64)
        spectrum[places] = values / values.abs() * level
        out.add_(torch.fft.irfft(spectrum, n=x.numel(), norm="ortho"), alpha=0.5)

    return Pair(encode, decode_add)


def with_singular_vectors(x: torch.Tensor, out: torch.Tensor) -> Pair:
    """Singular vectors that are drawn in proportion to their values, as halves."""

    def encode() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, sizes, right = torch.linalg.svd(x, full_matrices=False)
        chosen = (draws(sizes) * sizes.sum() / 3.0 < sizes).nonzero()[:, 0]
        return left[:, chosen].half(), right[chosen].half(), sizes.sum() / 3.0

    left, right, level = encode()
    return Pair(encode, lambda: out.addmm_(left.float() * level, right.float(), alpha=0.5))


def with_hashes(x: torch.Tensor, out: torch.Tensor) -> Pair:
    """A count sketch whose hashes are tables that were made before."""
    cells = torch.randint(0, COLUMNS, (ROWS, x.numel()), generator=GENERATOR)
    signs = torch.randint(0, 2, (ROWS, x.numel()), generator=GENERATOR, dtype=torch.int8).mul_(2).sub_(1)
    table = torch.zeros(ROWS, COLUMNS)

    def accumulate() -> None:
        for row in range(ROWS):
            table[row].index_add_(0, cells[row], x * signs[row])

    def estimate() -> torch.Tensor:
        return torch.stack([table[row][cells[row]] * signs[row] for row in range(ROWS)]).median(dim=0).values

    return Pair(accumulate, estimate)


def cases(elements: int) -> list[Case]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=elements // 512 * 512).astype(np.float32)
    small = x[: min(elements, SMALL) // 512 * 512]
    matrix = small[: SIDE * SIDE // 512 * 512].reshape(512, -1)
    of_a_batch = gradient([matrix.shape], 64, 0).reshape(matrix.shape)
    return [
        Case("ternary", x, codecs.Ternary(), with_ternary(256)),
        Case("ternary, block 64, byte scales", x, codecs.Ternary(block=64, scales="byte"), with_ternary(64)),
        Case("levels (QSGD), 4 bits", x, codecs.Levels(), with_levels(7, 512)),
        Case("top-k, 1 %", x, codecs.TopK(ratio=0.01), with_top_k(0.01)),
        Case("top-k, 0.1 %", x, codecs.TopK(ratio=0.001), with_top_k(0.001)),
        Case("count sketch", x, CountSketch(ROWS, COLUMNS, TILE, key=1), with_hashes),
        Case("identity", x, codecs.Identity(), with_copy),
        Case("entrywise", small, codecs.Entrywise(), with_entries),
        Case("fourier", small, codecs.Fourier(), with_fourier),
        Case("spectral", matrix, codecs.Spectral(), with_singular_vectors),
        Case("spectral, of rank 64", of_a_batch, codecs.Spectral(), with_singular_vectors),
    ]


# Measuring


def times_ms(run: Timed, repetitions: int) -> list[float]:
    """Ascending; one run before them is not counted."""
    run()
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)


def figures(pair: Pair, repetitions: int) -> dict[str, Any]:
    found = {}
    for name, run in pair._asdict().items():
        times = times_ms(run, repetitions)
        quartiles = [times[len(times) // 4], times[-1 - len(times) // 4]]
        found[name] = {"ms": times[len(times) // 2], "quartiles_ms": quartiles}
    return found


@contextlib.contextmanager
def numpys() -> Iterator[None]:
    """The codecs then use NumPy's kernels."""
    compiled = {name: getattr(kernels, name) for name in kernels.__all__ if hasattr(definition, name)}
    for name in compiled:
        setattr(kernels, name, getattr(definition, name))
    try:
        yield
    finally:
        for name, kernel in compiled.items():
            setattr(kernels, name, kernel)


def measured(case: Case, repetitions: int, others: bool) -> dict[str, Any]:
    n = case.x.size
    copied = np.ones_like(case.x)
    memcpy = times_ms(lambda: np.copyto(copied, case.x), 3 * repetitions)
    found: dict[str, Any] = {"elements": n, "memcpy_ms": memcpy[len(memcpy) // 2], "compiled": figures(case.ours(), repetitions)}
    if others:
        few = max(3, repetitions // 2)  # they take long, and their ratios are large
        with numpys():
            found["numpy"] = figures(case.ours(), few)
        shape = torch.from_numpy(case.x)
        found["pytorch"] = figures(case.pytorch(shape, torch.zeros_like(shape)), few)
    return found


def table(results: dict[str, Any], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    columns = ("encode ms", "GB/s", "decode ms", "GB/s", "x memcpy", "NumPy / it", "PyTorch / it")
    shown.add_column("codec")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, one in results.items():
        parts, gigabytes = one["compiled"], 4e-6 * one["elements"]
        both = math.fsum(part["ms"] for part in parts.values())
        cells = [text for part in parts.values() for text in (f"{part['ms']:.2f}", f"{gigabytes / part['ms']:.2f}")]
        ratios = [math.fsum(p["ms"] for p in one[o].values()) / both if o in one else None for o in ("numpy", "pytorch")]
        shown.add_row(name, *cells, f"{both / one['memcpy_ms']:.1f}", *("" if r is None else f"{r:.1f}" for r in ratios))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--isa", choices=native.instruction_sets(), default=native.instruction_set())
    parser.add_argument("--only", default="", help="codecs whose name has this in it")
    parser.add_argument("--no-others", action="store_true", help="leave NumPy and PyTorch out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    native.choose(args.isa)
    chosen = [case for case in cases(args.elements) if args.only in case.name]
    results = {case.name: measured(case, args.repetitions, not args.no_others) for case in chosen}
    if args.json:
        print(json.dumps({"instruction_set": args.isa, "repetitions": args.repetitions, "codecs": results}, indent=1))
        return
    title = f"{args.elements:,} floats ({SMALL:,} for the atoms), {args.isa}, one thread, medians of {args.repetitions}"
    Console(width=None if os.isatty(1) else 120).print(table(results, title))


if __name__ == "__main__":
    main()
