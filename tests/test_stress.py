"""A random training on three ranks, which goes on as the simulation does."""

from __future__ import annotations

import pytest
from conftest import RANKS
from launch import mpirun


@pytest.mark.parametrize(("steps", "seed"), [(30, 0), pytest.param(700, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_random_training_is_that_of_the_simulation(steps: int, seed: int) -> None:
    """With each of three methods; the long tier's is of 2,100 steps."""
    done = mpirun(3, RANKS / "stress.py", str(steps), str(seed), timeout=800)
    assert done.returncode == 0 and "seen:" in done.stdout, done.stdout[-6000:]
