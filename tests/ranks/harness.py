"""Many checks in one start of mpirun: every rank runs them in order, and writes down how each ended."""

from __future__ import annotations

import ast
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

Check = Callable[[], None]

LEAST_RANKS = {"check": 1, "check_of_two": 2, "check_of_three": 3}  # by the decorator's name

_checks: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Marks a check for any number of ranks."""
    _checks[function.__name__] = function
    return function


check_of_two = check_of_three = check


def checks_in(script: Path) -> dict[str, int]:
    """The checks of a script, with the least number of ranks that each is for; the script is not run."""
    return {
        node.name: LEAST_RANKS[decorator.id]
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Name) and decorator.id in LEAST_RANKS
    }


def main(rank: int, size: int) -> None:
    """Runs the checks that the command line names, or all, and writes `<directory>/<rank>.json` around each of them.

    A check that fails on one rank only may leave the others waiting: the start's time limit ends that, and what the
    ranks were in by then is on record.
    """
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    for name, least in checks_in(Path(sys.argv[0])).items():
        if size < least or (names and name not in names):
            continue
        results[name] = "did not end"
        _write(directory, rank, results)
        try:
            _checks[name]()
            results[name] = "ok"
        except BaseException:
            results[name] = traceback.format_exc()
        _write(directory, rank, results)


def _write(directory: Path, rank: int, results: dict[str, str]) -> None:
    (directory / f"{rank}.json").write_text(json.dumps(results))
