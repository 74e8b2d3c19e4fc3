"""Faults that end a job: each has a start of its own."""

from __future__ import annotations

import re

import pytest
from conftest import RANKS
from launch import mpirun
from ranks.harness import PAPERS


@pytest.mark.parametrize(
    ("fault", "told", "beside"),
    [
        ("no_compression_on_one_rank", "Mismatched ALLREDUCE tensor shapes", "is the same compression= given on every rank"),
        *(
            (f"{fault} {method}", r"hvd\.join\(\)|Horovod has been shut down", "")
            for fault in ("join", "join_before_the_first_step")
            for method in PAPERS
        ),
    ],
)
def test_faults_that_end_a_job(fault: str, told: str, beside: str) -> None:
    # With Horovod's cache of responses its thread may die on the rank that joined, and the other rank does not end.
    cache = {"HOROVOD_CACHE_CAPACITY": "0"} if fault.startswith("join ") else {}
    done = mpirun(2, RANKS / "torch_faults.py", *fault.split(), timeout=60, HVDCOMPRESS_HANDSHAKE_SECONDS="2", **cache)
    endings = re.findall(r"rank \d ended after [\d.]+ s: (.*)", done.stdout)
    assert len(endings) == 2, done.stdout
    assert all(re.search(told, ending) for ending in endings), done.stdout
    assert beside in done.stdout, done.stdout
