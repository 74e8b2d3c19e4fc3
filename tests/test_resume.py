"""A training that was saved goes on in new processes: bit for bit with as many ranks, and with others where they are equal."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import RANKS
from launch import mpirun
from ranks.resume import METHODS


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory):
    """Of all ranks, by framework, what was done, method and number of ranks; each start is made once."""

    @cache
    def directory(framework: str) -> Path:
        path = tmp_path_factory.mktemp(framework)
        for method in METHODS:
            (path / method).mkdir()
        return path

    @cache
    def start(framework: str, what: str, ranks: int) -> None:
        if what == "resume":
            start(framework, "save", 2)
        done = mpirun(ranks, RANKS / "resume.py", framework, what, directory(framework), timeout=100)
        assert done.returncode == 0, done.stdout[-4000:]

    def get(framework: str, what: str, method: str, ranks: int) -> list[list[np.ndarray]]:
        start(framework, what, ranks)
        files = [directory(framework) / f"{what}-{method}-{rank}-of-{ranks}.npz" for rank in range(ranks)]
        return [list(np.load(file).values()) for file in files]

    return get


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(weights, framework: str, method: str) -> None:
    whole, resumed = weights(framework, "save", method, 2), weights(framework, "resume", method, 2)
    for rank in range(2):
        for a, b, first in zip(whole[rank], resumed[rank], whole[0]):
            assert a.tobytes() == b.tobytes() == first.tobytes(), f"{method}, rank {rank}"
            assert np.isfinite(a).all() and np.abs(a).max() > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_more_ranks_go_on_alike(weights, framework: str, method: str) -> None:
    resumed, whole = weights(framework, "resume", method, 3), weights(framework, "save", method, 2)
    for rank in (1, 2):
        for a, first in zip(resumed[rank], resumed[0]):
            assert a.tobytes() == first.tobytes() and np.isfinite(a).all(), f"{method}, rank {rank}"
    distance = sum(float(((a - b) ** 2).sum()) for a, b in zip(resumed[0], whole[0]))
    length = sum(float((b**2).sum()) for b in whole[0])
    assert 0 < distance < 0.01 * length, f"{method}: not the same data, but nearly the same training"
