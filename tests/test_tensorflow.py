"""The TensorFlow adapter and the Keras callbacks under real Horovod and mpirun."""

from __future__ import annotations

import pytest
from conftest import RANKS, Run
from ranks.harness import checks_in

SECONDS = 280.0  # for all checks on a number of ranks; they take up to 130


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        (ranks, check)
        for ranks in (1, 2, 3)
        for check, least in checks_in(RANKS / "tensorflow_checks.py").items()
        if ranks >= least
    ],
)
def test_on_ranks(run_checks: Run, ranks: int, check: str) -> None:
    results, output = run_checks("tensorflow_checks.py", ranks, SECONDS)
    assert len(results) == ranks
    for rank, result in enumerate(results):
        assert result.get(check) == "ok", f"rank {rank}: {result.get(check, 'was not begun')}\n{output[-3000:]}"
