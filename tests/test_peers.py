"""A peer that fails: the job goes on or ends, and who keeps it waiting is told, with what is waited for."""

from __future__ import annotations

import re
import time

import pytest
from conftest import RANKS
from launch import mpirun

STALL, SLOW, FROZEN = 2.0, 5.0, 8.0  # seconds: until it is told, and that a rank is slow or frozen
SCRIPT = RANKS / "peer_faults.py"


@pytest.mark.parametrize(
    ("framework", "ranks"),
    [("torch", 3), pytest.param("tensorflow", 2, marks=pytest.mark.slow), pytest.param("mpi", 2, marks=pytest.mark.slow)],
)
def test_a_rank_that_is_slow_or_frozen_is_named(framework: str, ranks: int) -> None:
    done = mpirun(ranks, SCRIPT, framework, "frozen", timeout=90, HVDCOMPRESS_STALL_SECONDS=str(STALL))
    assert done.returncode == 0, done.stdout[-4000:]
    last = ranks - 1
    who = rf"rank {last} \(process \d+ on \S+\)"
    told = {
        "slow": rf"in step 3, for .*: {who} runs, but has not done its part: nothing came of it for \d",
        "frozen": rf"in step 6, for .*: {who} does not answer: it has stopped, or cannot be reached",
    }
    for fault, text in told.items():
        (at,) = re.findall(rf"\[([\d.]+)\] {fault}", done.stdout)
        found = re.findall(rf"\[([\d.]+)\] told: rank (\d) has waited for 2 s {text}", done.stdout)
        assert sorted(int(rank) for _, rank in found) == list(range(last)), f"{fault}: {done.stdout[-4000:]}"
        for when, _ in found:
            assert STALL - 0.5 < float(when) - float(at) < STALL + 5, f"{fault}: {done.stdout[-4000:]}"
        assert f"bucket 0 in stage 1 of 2 (alltoall){', bucket 1' if framework == 'torch' else ''}" in done.stdout
        assert "the status records" in done.stdout
    assert len(re.findall(r"told: ", done.stdout)) == 2 * last, "each rank tells it once"
    assert len(re.findall(r"rank \d came to the end", done.stdout)) == ranks


@pytest.mark.parametrize(
    ("framework", "fault"),
    [
        ("torch", "killed"),
        pytest.param("torch", "ended", marks=pytest.mark.slow),
        pytest.param("tensorflow", "killed", marks=pytest.mark.slow),
        pytest.param("tensorflow", "ended", marks=pytest.mark.slow),
        pytest.param("mpi", "killed", marks=pytest.mark.slow),
        pytest.param("mpi", "ended", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_ends_the_job(framework: str, fault: str) -> None:
    runner = ["-m", "mpi4py"] if framework == "mpi" else []  # else mpi4py waits for the others when it is finalised
    done = mpirun(3, *runner, SCRIPT, framework, fault, timeout=90)
    over = time.time()
    assert done.returncode not in (0, 124), done.stdout[-4000:]
    (at,) = re.findall(rf"\[([\d.]+)\] {fault}", done.stdout)
    assert over - float(at) < 30, done.stdout[-4000:]
    assert "came to the end" not in done.stdout
