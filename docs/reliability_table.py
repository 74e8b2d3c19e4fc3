"""Writes the table of cases in docs/reliability.md: `python docs/reliability_table.py`. A test checks it."""

from __future__ import annotations

import sys
from pathlib import Path

from tables import replaced

PAGE = Path(__file__).with_name("reliability.md")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cases import CASES, FRAMEWORKS, Case, covered, found, missing  # noqa: E402


def table() -> str:
    """A row for each case: what holds, with which methods it is tested under which framework, and why not with others."""
    rows = [
        f"| what went wrong, and where | what holds here | {' | '.join(FRAMEWORKS)} | not tested, and why | tests |",
        f"|---|---|{'---|' * len(FRAMEWORKS)}---|---|",
    ]
    for case in CASES:
        methods = [", ".join(sorted(covered(case, framework))) or "-" for framework in FRAMEWORKS]
        tests = sorted({f"`{Path(f.file).stem}::{f.function}`" for refs in case.tests.values() for f in map(found, refs)})
        row = (f"{case.fault} ({case.source})", case.holds, *methods, _reasons(case), "<br>".join(tests))
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _reasons(case: Case) -> str:
    told: dict[str, list[str]] = {}
    for framework in FRAMEWORKS:
        without = missing(case, framework)
        for reason in dict.fromkeys(without.values()):
            names = [method for method, its in without.items() if its == reason]
            told.setdefault(str(reason), []).append(framework if len(names) == 3 else f"{framework} {', '.join(names)}")
    return "; ".join(f"{', '.join(where)}: {reason}" for reason, where in told.items())


def page(text: str) -> str:
    """The page with its table replaced by the present one."""
    return replaced(text, "cases", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
