"""Many checks in one start of mpirun: every rank runs them in order, and writes down how each ended."""

from __future__ import annotations

import ast
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from hvdcompress import CompressionError

Check = Callable[[], None]

# The least and the most ranks that a check is for, by the decorator's name.
FOR_RANKS = {
    "check": (1, 99),
    "check_of_one": (1, 1),
    "check_of_two": (2, 99),
    "check_of_three": (3, 99),
    "check_on_two": (2, 2),
    "check_on_three": (3, 3),
    "check_on_four": (4, 4),
}

# The papers' methods, by their names in the registry.
PAPERS = ("sketch", "atomo", "dore")

_checks: dict[str, Check] = {}


class Each(NamedTuple):
    """A check that is made with each of the papers' methods, and is given the method's name."""

    function: Callable[[str], None]


def each(function: Callable[[str], None]) -> Each:
    """Marks a check to be made with each of the papers' methods; the decorator below the one that says for which ranks."""
    return Each(function)


def check(function: Check | Each) -> Check | Each:
    """Marks a check for any number of ranks."""
    if isinstance(function, Each):
        _checks.update({f"{function.function.__name__}[{name}]": partial(function.function, name) for name in PAPERS})
    else:
        _checks[function.__name__] = function
    return function


check_of_one = check_of_two = check_of_three = check_on_two = check_on_three = check_on_four = check


def checks_for(script: Path, ranks: int) -> list[str]:
    """The checks of a script that are for so many ranks; the script is not run."""
    names = []
    for node in ast.parse(script.read_text()).body:
        decorators = [d.id for d in getattr(node, "decorator_list", []) if isinstance(d, ast.Name)]
        for least, most in (FOR_RANKS[d] for d in decorators if d in FOR_RANKS):
            if least <= ranks <= most:
                names += [f"{node.name}[{method}]" for method in PAPERS] if "each" in decorators else [node.name]
    return names


def main(rank: int, size: int) -> None:
    """Runs the checks that the command line names, or all, and writes `<directory>/<rank>.json` around each of them.

    A check that fails on one rank only may leave the others waiting: the start's time limit ends that, and what the
    ranks were in by then is on record.
    """
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    results = {}
    for name in names or checks_for(Path(sys.argv[0]), size):
        results[name], began = "did not end", time.monotonic()
        _write(directory, rank, results)
        try:
            _checks[name]()
            results[name] = "ok"
        except BaseException:
            results[name] = traceback.format_exc()
        _write(directory, rank, results)
        if rank == 0:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


def everyone(value: Any) -> list[Any]:
    """Each rank's value, in rank order."""
    from mpi4py import MPI  # begins with MPI_Init, which is for the ranks only

    return MPI.COMM_WORLD.allgather(value)


def raised_everywhere(function: Callable[[], Any], *fragments: str, error: type[Exception] = CompressionError) -> None:
    """Every rank raises the same class of error, and each message has all of the fragments."""
    with pytest.raises(error) as caught:
        function()
    for name, message in everyone((type(caught.value).__name__, str(caught.value))):
        assert name == type(caught.value).__name__, f"{name}: {message}, against {caught.value}"
        for fragment in fragments:
            assert fragment in message, message


def same_bits(actual: Iterable[Any], expected: Iterable[Any], message: str = "") -> None:
    for a, e in zip(actual, expected):
        assert_array_equal(np.atleast_1d(a).view(np.uint8), np.atleast_1d(e).view(np.uint8), message)


def _write(directory: Path, rank: int, results: dict[str, str]) -> None:
    (directory / f"{rank}.json").write_text(json.dumps(results))
