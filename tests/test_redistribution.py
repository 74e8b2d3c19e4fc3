"""Where the ranks of one group stopped, those of another go on: what was kept back of gradients is not lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from hvdcompress import CompressionError, Layout, make, testing
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.memory import redistributed
from hvdcompress.reducers import two_pass

LAYOUTS = testing.LAYOUTS
SIZES = list(itertools.permutations((1, 2, 3, 5), 2))
# Methods in which what was applied and what is kept back are together the sum of all gradients.
CONSERVING = (
    "topk:ratio=0.1,exchange=allgather",
    "mem_sgd:block=16,exchange=allgather",
    "mem_sgd:block=16,exchange=sharded",
    "double_squeeze:block=16,exchange=allgather",
    "double_squeeze:block=16,exchange=sharded",
    "double_squeeze_topk:ratio=0.2,exchange=allgather",
    "sketch:ratio=0.3,exact_below=10,momentum=0",
    "local_topk:ratio=0.1,exact_below=10,momentum=0",
    "true_topk:ratio=0.1,exact_below=10,momentum=0",
)


def taken_over(simulation: Simulation, method: str, ranks: int, left: list[int] | None = None) -> Simulation:
    """So many ranks that go on where others stopped, or where those of them stopped that are left."""
    other = Simulation(make(method), LAYOUTS, ranks)
    memories = [session.state_dict() for session in simulation.sessions]
    for rank, session in enumerate(other.sessions):
        saved = [memories[old] for old in left or range(len(memories))]
        session.load_state_dict(redistributed(saved, make(method), rank, ranks))
    return other


def kept_back(simulation: Simulation, bucket: int) -> np.ndarray:
    """float64[layout.size]: what all ranks together have not applied yet, in units of the mean."""
    arrays = [simulation.arrays(rank, bucket) for rank in range(len(simulation.sessions))]
    total = np.zeros(LAYOUTS[bucket].size)
    for name in ("own_e", "v"):
        total += np.mean([a[name].astype(np.float64) for a in arrays if name in a] or [np.zeros(1)], axis=0)
    if "e" in arrays[0]:
        whole = arrays[0]["e"].size == total.size
        total += arrays[0]["e"] if whole else np.concatenate([a["e"] for a in arrays])
    return total


@pytest.mark.parametrize("method", CONSERVING)
def test_no_part_of_a_gradient_is_lost(method: str) -> None:
    for before, after in SIZES:
        simulation, other = Simulation(make(method), LAYOUTS, before), None
        given, applied = ([np.zeros(layout.size) for layout in LAYOUTS] for _ in range(2))
        for step in range(8):
            if step == 4:
                other = simulation = taken_over(simulation, method, after)
            grads = testing.gradients(LAYOUTS, step, len(simulation.sessions))
            means = simulation.step(grads)
            assert means is not None
            for bucket in range(len(LAYOUTS)):
                given[bucket] += np.mean([rank[bucket].astype(np.float64) for rank in grads], axis=0)
                applied[bucket] += means[bucket]
                kept = kept_back(simulation, bucket)
                where = f"{method}, {before} ranks to {after}, step {step}, bucket {bucket}"
                assert_allclose(applied[bucket] + kept, given[bucket], atol=1e-4, err_msg=where)
        assert other is not None


@pytest.mark.parametrize("first", ["allgather", "sharded"])
@pytest.mark.parametrize("second", ["allgather", "sharded"])
def test_memories_of_gradients_become_their_mean(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """h is then the mean of the h_i, and every master has the copies that the ranks have; also where the exchange is another."""
    for before, after in SIZES:
        chosen = {before: first, after: second}  # exchange="auto" goes by the number of ranks
        monkeypatch.setattr(two_pass, "_choose", lambda settings, layout, ranks, chosen=chosen: chosen[ranks])
        simulation = Simulation(make("dore:block=16"), LAYOUTS, before)
        for step in range(4):
            simulation.step(testing.gradients(LAYOUTS, step, before))
        other = taken_over(simulation, "dore:block=16", after)
        for bucket in range(len(LAYOUTS)):
            where = f"{first} on {before} ranks, {second} on {after}, bucket {bucket}"
            mean = np.mean([h_of(simulation, rank, bucket) for rank in range(before)], axis=0, dtype=np.float64)
            assert_allclose(kept_back(other, bucket), kept_back(simulation, bucket), rtol=1e-5, atol=1e-6, err_msg=where)
            for rank in range(after):
                h, copies = h_of(other, rank, bucket), other.arrays(rank, bucket)["copies"]
                assert_allclose(h, mean, rtol=1e-5, atol=1e-6, err_msg=where)
                part = two_pass._divide(h.size, after, 16)[rank].where if second == "sharded" else slice(None)
                for row in copies:
                    assert_array_equal(row, h[part], where)
        assert other.step(testing.gradients(LAYOUTS, 4, after)) is not None


def h_of(simulation: Simulation, rank: int, bucket: int) -> np.ndarray:
    arrays = simulation.arrays(rank, bucket)
    return arrays["h"] if "h" in arrays else arrays["copies"][rank]


@pytest.mark.parametrize("method", ["dore:block=16,exchange=sharded", "sketch:ratio=0.3,exact_below=10", "atomo"])
def test_those_that_are_left_go_on(method: str) -> None:
    simulation = Simulation(make(method), LAYOUTS, 4)
    for step in range(4):
        simulation.step(testing.gradients(LAYOUTS, step, 4))
    other = taken_over(simulation, method, 3, left=[0, 2, 3])
    for session in other.sessions:
        assert session.committed == 4
        for state in session.states:
            for name in {"h", "v"} & set(state.arrays):
                old = [simulation.arrays(rank, state.layout.bucket)[name] for rank in (0, 2, 3)]
                assert_allclose(state.arrays[name], np.mean(old, axis=0), rtol=1e-5, atol=1e-6)
    assert other.step(testing.gradients(LAYOUTS, 4, 3)) is not None


def test_what_cannot_be_kept_is_told() -> None:
    """exchange="auto" averages a small bucket dense where many ranks would send more, and that has no memory."""
    layout = Layout.of([("w", (60, 60))])
    simulation = Simulation(make("topk:ratio=0.05"), layout, 2)
    simulation.step([[np.linspace(-1, 1, 3600, dtype=np.float32)]] * 2)
    other = Simulation(make("topk:ratio=0.05"), layout, 64).sessions[0]
    assert simulation.sessions[0].states[0].arrays and not other.states[0].arrays
    with pytest.warns(RuntimeWarning, match=r"with 64 ranks bucket 0 is averaged dense.*l2 norm .* is dropped"):
        redistributed([session.state_dict() for session in simulation.sessions], make("topk:ratio=0.05"), 0, 64)


def test_memories_that_do_not_belong_together_are_refused() -> None:
    good = [session.state_dict() for session in Simulation(make("dore:block=16"), LAYOUTS, 2).sessions]
    bad = {
        "block=32": [Simulation(make("dore:block=32"), LAYOUTS, 2).sessions[0].state_dict(), good[1]],
        "ranks 0 and 1 are of steps 0 and 7": [good[0], {**good[1], "step": 7}],
        "rank 5 of 2": [good[0], {**good[1], "rank": 5}],
        "rank 0 of many": [{**good[0], "facts": {**good[0]["facts"], "number of ranks": "many"}}],
        "no memory of a compressor": [good[0], {**good[1], "step": "7"}],
        "rank 1 has no 0.copies": [good[0], {**good[1], "arrays": {}}],
    }
    for told, memories in bad.items():
        with pytest.raises(CompressionError) as caught:
            redistributed(memories, make("dore:block=16"), 0, 3)
        assert told in str(caught.value), caught.value
    session = Simulation(make("dore:block=32"), LAYOUTS, 3).sessions[0]
    with pytest.raises(CompressionError, match="of what was saved and what is here, method: "):
        session.load_state_dict(redistributed(good, make("dore:block=16"), 0, 3))
