"""The mpi4py driver under mpirun."""

from __future__ import annotations

import pytest
from conftest import RANKS, Run
from ranks.harness import checks_in


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("check", checks_in(RANKS / "mpi_checks.py"))
def test_on_ranks(run_checks: Run, ranks: int, check: str) -> None:
    results, output = run_checks("mpi_checks.py", ranks, 60.0)
    assert len(results) == ranks
    for rank, result in enumerate(results):
        assert result.get(check) == "ok", f"rank {rank}: {result.get(check, 'was not begun')}\n{output[-3000:]}"
