"""Writes the tables of docs/methods.md from the registry: `python docs/methods_table.py`. A test checks them."""

from __future__ import annotations

import inspect
from pathlib import Path

from tables import replaced

from hvdcompress import Group, Layout, make, methods
from hvdcompress.core import Reducer
from hvdcompress.reducers import Dense

PAGE = Path(__file__).with_name("methods.md")
LAYOUT = Layout.of([("weight", (2048, 2048))])
RANKS = (2, 4, 16, 64)


def table() -> str:
    """Two tables: what each method is, and what it comes to for one matrix."""
    words = [
        "| `Compression.` | method, source | what travels | bytes a rank sends in a step | bias | floats kept by a rank "
        "| exact for | when to use it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    figures = [
        f"| `Compression.` | {' | '.join(f'W = {ranks}' for ranks in RANKS)} | floats kept / d, W = {RANKS[1]} | options |",
        f"|---|{'---:|' * (len(RANKS) + 1)}---|",
    ]
    for name, maker in methods.items():
        facts, method = maker.facts, make(name)
        what = f"{facts.title}{f' ({facts.source})' if facts.source else ''}"
        row = (f"`{name}`", what, facts.travels, facts.wire, facts.bias, facts.memory, facts.exact_for, facts.use)
        words.append(f"| {' | '.join(row)} |")
        shares = [f"{_share(method, ranks):.2%}" for ranks in RANKS]
        kept = sum(a.size for a in method.init(LAYOUT, Group(0, RANKS[1])).arrays.values()) / LAYOUT.size
        figures.append(f"| `{name}` | {' | '.join(shares)} | {kept:.3g} | {_options(maker)} |")
    return "\n".join([*words, "", *figures])


def _share(method: Reducer, ranks: int) -> float:
    group = Group(0, ranks)
    return method.wire_bytes(LAYOUT, group) / Dense().wire_bytes(LAYOUT, group)


def _options(maker: object) -> str:
    parameters = inspect.signature(maker).parameters.values()  # type: ignore[arg-type]
    return ", ".join(f"`{p.name}={p.default!r}`" for p in parameters)


def page(text: str) -> str:
    """The page with its table replaced by the present one."""
    return replaced(text, "tables", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
