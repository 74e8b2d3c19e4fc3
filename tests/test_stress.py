"""Trainings that are random, or long."""

from __future__ import annotations

import pytest
from conftest import RANKS
from launch import mpirun


@pytest.mark.parametrize(("steps", "seed"), [(30, 0), pytest.param(700, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_random_training_is_that_of_the_simulation(steps: int, seed: int) -> None:
    """With each of three methods; the long tier's is of 2,100 steps."""
    done = mpirun(3, RANKS / "stress.py", str(steps), str(seed), timeout=800)
    assert done.returncode == 0 and "seen:" in done.stdout, done.stdout[-6000:]


SOAKED = ("dore", "sketch:ratio=0.1,momentum=0", "atomo:budget=3")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_training_keeps_its_memory_and_its_ranks_the_same_weights() -> None:
    done = mpirun(2, RANKS / "soak.py", "10000", *SOAKED, timeout=1700)
    assert done.returncode == 0 and done.stdout.count("soaked:") == len(SOAKED), done.stdout[-6000:]
