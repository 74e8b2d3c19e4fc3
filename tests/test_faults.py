"""Faults that end a job: each has a start of its own."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import RANKS
from launch import mpirun
from ranks.harness import PAPERS

EVERYDAY = {("join", "atomo"), ("join", "dore")}  # the others are of the long tier


@pytest.mark.parametrize(
    ("fault", "told", "beside"),
    [
        ("no_compression_on_one_rank", "Mismatched ALLREDUCE tensor shapes", "is the same compression= given on every rank"),
        *(
            pytest.param(
                f"{fault} {method}",
                r"hvd\.join\(\)|Horovod has been shut down",
                "",
                marks=[] if (fault, method) in EVERYDAY else [pytest.mark.slow],
            )
            for fault in ("join", "join_before_the_first_step")
            for method in PAPERS
        ),
    ],
)
def test_faults_that_end_a_job(fault: str, told: str, beside: str) -> None:
    done = mpirun(2, RANKS / "torch_faults.py", *fault.split(), timeout=60, HVDCOMPRESS_HANDSHAKE_SECONDS="2")
    assert all(re.search(told, ending) for ending in endings_of(done)), done.stdout
    assert beside in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("fault", "method"),
    [
        pytest.param(fault, method, marks=[] if (fault, method) in EVERYDAY else [pytest.mark.slow])
        for fault in ("join", "join_before_the_first_step")
        for method in PAPERS
    ],
)
def test_a_join_under_tensorflow_ends_the_job(fault: str, method: str) -> None:
    done = mpirun(2, RANKS / "tensorflow_faults.py", fault, method, timeout=60)
    trains, joined = endings_of(done)
    assert "not supported with Join" in trains, done.stdout
    assert "Horovod has been shut down" in joined, done.stdout


def endings_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What each rank has printed last, in rank order."""
    endings = dict(re.findall(r"rank (\d) ended after [\d.]+ s: (.*)", done.stdout))
    assert sorted(endings) == ["0", "1"], done.stdout
    return [endings[rank] for rank in "01"]
