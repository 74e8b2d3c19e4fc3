"""The step as one transaction, in simulation, where every fault can be made."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from hvdcompress import CompressionError, Dense, Dore, Group, Layout, MismatchError, make
from hvdcompress.core import AllGather, AllReduce
from hvdcompress.drivers.simulate import Simulation
from hvdcompress.session import STATUS_BYTES, Session

LAYOUTS = [Layout.of([("a", (50, 7))], 0), Layout.of([("b", (300,))], 1)]
EXCHANGES = pytest.mark.parametrize("exchange", ["allgather", "sharded"])


def grads(step: int, ranks: int = 3) -> list[list[np.ndarray]]:
    rng = np.random.default_rng([step, ranks])
    return [[rng.normal(size=layout.size).astype(np.float32) for layout in LAYOUTS] for _ in range(ranks)]


def memory(simulation: Simulation) -> list[bytes]:
    return [a.tobytes() for s in simulation.sessions for state in s.states for a in state.arrays.values()]


def simulation_of(exchange: str, **options) -> Simulation:
    return Simulation(Dore(block=16, exchange=exchange), LAYOUTS, 3, **options)


@EXCHANGES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_with_a_gradient_that_is_not_finite_leaves_no_trace(exchange: str, bad: float) -> None:
    simulation, twin = simulation_of(exchange), simulation_of(exchange)
    for step in range(6):
        if step == 3:
            before, spoilt = memory(simulation), grads(77)
            spoilt[2][1][9] = bad
            assert simulation.step_each(spoilt) == [None] * 3
            assert memory(simulation) == before
            assert [s.abandoned for s in simulation.sessions] == [1] * 3
        for got, expected in zip(simulation.step(grads(step)), twin.step(grads(step))):
            assert_array_equal(got, expected, f"step {step}")


def test_a_mean_that_overflows_is_abandoned_by_all() -> None:
    simulation = Simulation(Dense(), LAYOUTS, 2)
    largest = [[np.full(layout.size, np.finfo(np.float32).max) for layout in LAYOUTS]] * 2
    with np.errstate(over="ignore"):
        assert simulation.step_each(largest) == [None, None]
    assert simulation.step(grads(0, 2)) is not None


@EXCHANGES
def test_a_residual_that_overflows_is_abandoned_by_all(exchange: str) -> None:
    simulation = simulation_of(exchange)
    largest = [[np.full(layout.size, np.finfo(np.float32).max) for layout in LAYOUTS]] * 3
    before = memory(simulation)
    assert simulation.step_each(largest) == [None] * 3
    assert memory(simulation) == before


class Failing:
    """A reducer that raises before its nth collective on one rank."""

    def __init__(self, inner: Dore, at: int):
        self.inner, self.at, self.stages = inner, at, inner.stages

    def __repr__(self) -> str:
        return repr(self.inner)

    def init(self, layout, group):
        return self.inner.init(layout, group)

    def reduce(self, grad, state, step):
        generator, reply = self.inner.reduce(grad, state, step), None
        for _ in range(self.at if step.number == 1 else 9):
            try:
                reply = yield generator.send(reply)
            except StopIteration as stop:
                return stop.value
        raise MemoryError("no room")


@pytest.mark.parametrize(("exchange", "at"), [("allgather", 0), ("sharded", 0), ("sharded", 1)])
def test_a_failure_while_payloads_are_owed_is_raised_by_all(exchange: str, at: int) -> None:
    methods = [Dore(block=16, exchange=exchange)] * 3
    simulation = Simulation([methods[0], Failing(methods[1], at), methods[2]], LAYOUTS, 3)
    simulation.step(grads(0))
    before = memory(simulation)
    results = simulation.step_each(grads(1))
    assert [(type(r), str(r)) for r in results] == [(CompressionError, "rank 1: MemoryError: no room")] * 3
    assert memory(simulation) == before
    simulation.sessions[1].reducer = methods[1]
    assert simulation.step(grads(1)) is not None, "and the next step goes on"


@pytest.mark.parametrize(("exchange", "at"), [("allgather", 1), ("sharded", 2)])
def test_a_failure_after_the_last_payload_is_told_with_the_next_record(exchange: str, at: int) -> None:
    method = Dore(block=16, exchange=exchange)
    simulation = Simulation([method, Failing(method, at), method], LAYOUTS, 3)
    simulation.step(grads(0))
    first, second, third = (simulation.step_each(grads(step)) for step in (1, 2, 3))
    assert isinstance(first[1], CompressionError) and first[0] is not None and not isinstance(first[0], Exception)
    assert [str(r) for r in second] == ["rank 1: MemoryError: no room"] * 3
    assert all(isinstance(r, MismatchError) and "rank 1 has finished 1 steps and rank 0 2" in str(r) for r in third)


def test_an_allreduce_owed_by_a_failed_rank_has_the_right_size() -> None:
    simulation = Simulation(Dense(), LAYOUTS, 2)
    simulation.sessions[0].fail(ValueError("broken"))
    results = simulation.step_each(grads(0, 2))
    assert [str(r) for r in results] == ["rank 0: ValueError: broken"] * 2


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (Dore(block=32), "method: Dore(alpha=0.1, beta=1.0, eta=1.0, block=16"),
        (Dore(block=16, alpha=0.2), "alpha=0.2"),
        (Dense(), "Dense()"),
    ],
)
def test_ranks_that_differ_hear_in_what(others, told: str) -> None:
    with pytest.raises(MismatchError) as caught:
        Simulation([Dore(block=16), Dore(block=16), others], LAYOUTS, 3)
    assert told in str(caught.value) and "ranks 0 and 2 differ" in str(caught.value)


def test_tensors_that_differ_are_named() -> None:
    layouts = [LAYOUTS, [LAYOUTS[0], Layout.of([("b", (301,))], 1)]]
    sessions = [Session(Dore(), lay, Group(rank, 2)) for rank, lay in enumerate(layouts)]
    records = [session.handshake() for session in sessions]
    for session in sessions:
        with pytest.raises(MismatchError, match=r"tensor b: \[300\] in bucket 1 and \[301\] in bucket 1"):
            session.check_handshake(records)


@EXCHANGES
def test_a_memory_is_saved_and_goes_on_bit_for_bit(exchange: str) -> None:
    simulation, again = simulation_of(exchange), simulation_of(exchange)
    for step in range(3):
        simulation.step(grads(step))
    for old, new in zip(simulation.sessions, again.sessions):
        new.load_state_dict(old.state_dict())
    for got, expected in zip(again.step(grads(3)), simulation.step(grads(3))):
        assert_array_equal(got, expected)
    assert memory(again) == memory(simulation)


def test_a_foreign_memory_is_refused_and_changes_nothing() -> None:
    simulation, (session, other, _) = simulation_of("sharded"), simulation_of("sharded").sessions
    saved = session.state_dict()
    bad = {
        "no memory": {"model": 1},
        "of rank 1": other.state_dict(),
        "block=32": Simulation(Dore(block=32), LAYOUTS, 3).sessions[0].state_dict(),
        "number of ranks: 2 and 3": Simulation(Dore(block=16, exchange="sharded"), LAYOUTS, 2).sessions[0].state_dict(),
        "1.e": {**saved, "arrays": {k: v for k, v in saved["arrays"].items() if k != "1.e"}},
        "0.h": {**saved, "arrays": {**saved["arrays"], "0.h": saved["arrays"]["0.h"][:-1]}},
    }
    before = memory(simulation)
    for told, state in bad.items():
        with pytest.raises(CompressionError) as caught:
            simulation.sessions[0].load_state_dict(state)
        assert told in str(caught.value), caught.value
    assert memory(simulation) == before


def test_bytes_are_counted_by_what_collectives_carry() -> None:
    sessions = Simulation(Dense(), LAYOUTS, 4)
    handshake = sessions.sessions[0].handshake().size
    for step in range(2):
        sessions.step(grads(step, 4))
        last = sessions.sessions[0].last
        elements = sum(layout.size for layout in LAYOUTS)
        status = 44 + (handshake if step == 0 else 0)
        assert last.wire == 2 * 3 / 4 * 4 * elements + 3 * status
        assert last.payload == 4 * elements + status
        assert last.dense == 2 * 3 / 4 * 4 * elements and last.paper == last.paper_dense == 8 * elements
    assert sessions.sessions[0].total.paper == 2 * last.paper


def test_the_handshake_names_what_must_be_equal() -> None:
    session = Session(Dore(), LAYOUTS, Group(0, 2, seed=3), {"tensor a": "float16[50, 7], in bucket 0"})
    facts = json.loads(session.handshake()[44:].tobytes())["agreed"]
    assert facts["seed"] == "3" and facts["tensor a"] == "float16[50, 7], in bucket 0" and "version" in facts


def test_what_is_asked_for_is_one_of_three_collectives() -> None:
    asked: list = []
    Simulation(Dense(), LAYOUTS, 2, tamper=lambda bucket, stage, requests: asked.extend(requests)).step(grads(0, 2))
    assert all(isinstance(request, (AllReduce, AllGather)) for request in asked) and len(asked) == 4


def test_buckets_with_and_without_figures_are_averaged_together() -> None:
    """A bucket that is averaged dense has none."""
    layouts = [Layout.of([("small", (3, 3))], 0), Layout.of([("large", (100, 100))], 1)]
    simulation = Simulation(Dore(), layouts, 16)
    rng = np.random.default_rng(0)
    given = [[rng.normal(size=layout.size).astype(np.float32) for layout in layouts] for _ in range(16)]
    for _ in range(2):
        assert simulation.step(given) is not None
    session = simulation.sessions[0]
    assert not session.states[0].arrays
    assert session.states[1].arrays
    assert 0 < session.metrics["uplink_density"] < 1


def test_a_rank_that_begins_while_another_is_training_is_told_so() -> None:
    old, new = (Session(Dore(), LAYOUTS, Group(rank, 2)) for rank in range(2))
    records = [old.record(), new.handshake()]
    with pytest.raises(MismatchError, match="rank 0 is in the middle of its training and rank 1 is not"):
        new.check_handshake(records)
    assert not old.agree(records)
    with pytest.raises(MismatchError, match="rank 1 is before its first step and rank 0 is not"):
        old.finish()


def test_a_loaded_memory_forgets_a_failure() -> None:
    layout = Layout.of([("w", (40,))])

    def cut(bucket: int, stage: int, asked: list) -> None:
        if spoiling:
            asked[0] = asked[0]._replace(payload=asked[0].payload[:-1])

    spoiling = []
    simulation = Simulation(make("topk:ratio=0.1,exchange=allgather"), layout, 2, tamper=cut)
    given = [[np.arange(40, dtype=np.float32)]] * 2
    simulation.step(given)
    saved = [session.state_dict() for session in simulation.sessions]
    spoiling.append(True)
    with pytest.raises(CompressionError):
        simulation.step(given)
    spoiling.clear()
    for session, state in zip(simulation.sessions, saved):
        session.load_state_dict(state)
    assert simulation.step(given) is not None


def test_bytes_are_predicted_bucket_by_bucket() -> None:
    """Their densities do not mean the same where their shapes differ."""
    layouts = [Layout.of([("w", shape)], bucket) for bucket, shape in enumerate([(512, 8), (64, 64), (1, 4096)])]
    simulation = Simulation(make("atomo:budget=2,exchange=allgather"), layouts, 3)
    for step in range(4):
        rng = np.random.default_rng(step)
        simulation.step([[rng.normal(size=layout.size).astype(np.float32) for layout in layouts] for _ in range(3)])
        session = simulation.sessions[0]
        sent = np.mean([s.last.wire for s in simulation.sessions]) - 2 * STATUS_BYTES
        if step:
            assert abs(session.predicted_bytes() / sent - 1) < 0.01
