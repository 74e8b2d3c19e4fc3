"""The PyTorch adapter under real Horovod and mpirun."""

from __future__ import annotations

import re

import pytest
from conftest import RANKS, Run
from launch import mpirun
from ranks.harness import checks_in

SECONDS = 200.0  # for all checks on a number of ranks; they take up to 50


@pytest.mark.parametrize(
    ("ranks", "check"),
    [(ranks, check) for ranks in (1, 2, 3, 4) for check, least in checks_in(RANKS / "torch_checks.py").items() if ranks >= least],
)
def test_on_ranks(run_checks: Run, ranks: int, check: str) -> None:
    results, output = run_checks("torch_checks.py", ranks, SECONDS)
    assert len(results) == ranks
    for rank, result in enumerate(results):
        assert result.get(check) == "ok", f"rank {rank}: {result.get(check, 'was not begun')}\n{output[-3000:]}"


@pytest.mark.parametrize(
    ("fault", "told", "beside"),
    [
        ("no_compression_on_one_rank", "Mismatched ALLREDUCE tensor shapes", "is the same compression= given on every rank"),
        ("join", r"hvd\.join\(\)|Horovod has been shut down", ""),
        ("join_before_the_first_step", r"hvd\.join\(\)|Horovod has been shut down", ""),
    ],
)
def test_faults_that_end_a_job(fault: str, told: str, beside: str) -> None:
    done = mpirun(2, RANKS / "torch_faults.py", fault, timeout=60, HVDCOMPRESS_HANDSHAKE_SECONDS="2")
    endings = re.findall(r"rank \d ended after [\d.]+ s: (.*)", done.stdout)
    assert len(endings) == 2, done.stdout
    assert all(re.search(told, ending) for ending in endings), done.stdout
    assert beside in done.stdout, done.stdout
