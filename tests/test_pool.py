"""Memory that is used again: never while somebody has it, and not kept for ever."""

from __future__ import annotations

import gc
from collections import defaultdict

import numpy as np
import pytest
import torch

from hvdcompress.kernels import pool

N = pool.LEAST + 7


@pytest.fixture(autouse=True)
def _a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_vectors", defaultdict(list))
    monkeypatch.setattr(pool, "_last_use", {})
    monkeypatch.setattr(pool, "_asked", 0)


def address(vector: np.ndarray) -> int:
    return vector.__array_interface__["data"][0]


def test_what_is_let_go_is_used_again() -> None:
    first = pool.empty(N)
    where = address(first)
    del first
    assert address(pool.empty(N)) == where


HELD = {
    "itself": lambda vector: vector,
    "slice": lambda vector: vector[5:6],
    "reshaped": lambda vector: vector[: N - 1].reshape(-1, 2),
    "torch": torch.from_numpy,
    "torch slice": lambda vector: torch.from_numpy(vector)[3:4].view(1, 1),
    "bytes": lambda vector: np.frombuffer(vector, np.uint8),
    "memoryview": memoryview,
}


@pytest.mark.parametrize("kind", HELD)
def test_what_somebody_has_is_not(kind: str) -> None:
    vector = pool.empty(N)
    where, held = address(vector), HELD[kind](vector)
    del vector
    assert address(pool.empty(N)) != where
    del held
    gc.collect()
    assert address(pool.empty(N)) == where


def test_sizes_that_nobody_asks_for_any_more_are_given_back() -> None:
    pool.empty(N)
    kept = pool.empty(N + 1)
    kept.fill(3)
    for _ in range(3 * pool.PATIENCE):
        pool.empty(N + 2)
    assert list(pool._vectors) == [N + 2] and len(pool._vectors[N + 2]) == 1
    assert kept.min() == kept.max() == 3


def test_small_vectors_are_the_allocators() -> None:
    pool.empty(pool.LEAST - 1)
    assert not pool._vectors
