"""The order in which a driver that can wait moves a step: replies may be worked on before the records are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvdcompress import CompressionError, Group, Layout, make
from hvdcompress.core import AllGather
from hvdcompress.drivers import blocking
from hvdcompress.drivers.simulate import Simulation, execute
from hvdcompress.session import Session

RANKS = 2
LAYOUTS = [Layout.of([("w", (64, 64))], bucket) for bucket in range(3)]
METHOD = "dore:exchange=sharded"


class Meeting:
    """Where the requests of all ranks come together, by name."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[int, Any]] = {}
        self.changed = threading.Condition()


class Transport:
    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank, self.log, self.step = meeting, rank, [], 0

    def submit(self, request: Any, name: str) -> str:
        name = f"{self.step}.{name}"
        with self.meeting.changed:
            self.meeting.asked.setdefault(name, {})[self.rank] = request
            self.meeting.changed.notify_all()
        self.log.append(f"submit {name}")
        return name

    def earlier(self, handle: str, other: str) -> bool:
        return True

    def wait(self, handle: str) -> Any:
        self.log.append(f"wait {handle}")
        with self.meeting.changed:
            assert self.meeting.changed.wait_for(lambda: len(self.meeting.asked[handle]) == RANKS, timeout=20)
        return execute([self.meeting.asked[handle][rank] for rank in range(RANKS)])[self.rank]

    def leave_behind(self, handles: Iterable[str]) -> None:
        pass


class Ranks:
    """Two sessions, each with a thread of its own."""

    def __init__(self) -> None:
        meeting = Meeting()
        self.transports = [Transport(meeting, rank) for rank in range(RANKS)]
        self.sessions = [Session(make(METHOD), LAYOUTS, Group(rank, RANKS)) for rank in range(RANKS)]
        self.each(lambda rank: blocking.shake_hands(self.sessions[rank], self.transports[rank]))

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(RANKS) as threads:
            return [future.result() for future in [threads.submit(self._caught, call, rank) for rank in range(RANKS)]]

    @staticmethod
    def _caught(call: Callable[[int], Any], rank: int) -> Any:
        try:
            return call(rank)
        except CompressionError as error:
            return error

    def step(self, grads: list[list[np.ndarray]]) -> list[Any]:
        def one(rank: int) -> Any:
            session, transport = self.sessions[rank], self.transports[rank]
            transport.step += 1
            transport.log.clear()
            pending = {b: transport.submit(session.start(b, grads[rank][b]), blocking.name(b, 0)) for b in range(len(LAYOUTS))}
            status = transport.submit(AllGather(session.record()), blocking.STATUS)
            return blocking.wind_up(session, transport, pending, status)

        return self.each(one)


def gradients(seed: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=layout.size).astype(np.float32) for layout in LAYOUTS] for _ in range(RANKS)]


def test_replies_are_worked_on_before_the_records_and_nothing_is_submitted_before_they_are_read() -> None:
    ranks, simulation = Ranks(), Simulation(make(METHOD), LAYOUTS, RANKS)
    for seed in range(3):
        means, expected = ranks.step(gradients(seed)), simulation.step(gradients(seed))
        for rank in range(RANKS):
            for mean, other in zip(means[rank], expected):
                np.testing.assert_array_equal(mean.view(np.uint32), other.view(np.uint32))
            log = [line.replace(f" {seed + 1}.", " ") for line in ranks.transports[rank].log]
            read = log.index("wait status")
            assert log.index("wait 0.0") < log.index("wait 1.0") < read < log.index("wait 2.0")
            assert read < log.index("submit 0.1") < log.index("submit 1.1") < log.index("submit 2.1")


def test_a_step_that_is_abandoned_submits_nothing_more_and_the_next_goes_on() -> None:
    ranks, simulation = Ranks(), Simulation(make(METHOD), LAYOUTS, RANKS)
    bad = gradients(0)
    bad[1][0][3] = np.nan
    assert ranks.step(bad) == [None, None]
    assert not any(line.startswith("submit") and line.endswith(".1") for line in ranks.transports[0].log)
    means, expected = ranks.step(gradients(1)), simulation.step(gradients(1))
    np.testing.assert_array_equal(means[0][2], expected[2])


@pytest.mark.parametrize("finite", [True, False])
def test_a_reply_that_cannot_be_read_is_told_to_all(finite: bool) -> None:
    ranks = Ranks()
    ranks.step(gradients(0))
    inner = ranks.sessions[0].reducer._master

    def failing(self: Any, *args: Any) -> Any:
        if args[1].group.rank == 0:
            raise MemoryError("no room")
        return inner(*args)

    grads = gradients(1)
    if not finite:
        grads[1][2][0] = np.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ranks.sessions[0].reducer), "_master", failing)
        results = ranks.step(grads)
    assert "no room" in str(results[0])
    if finite:
        assert str(results[1]) == str(results[0])
    else:  # too late for the others, who have abandoned the step: they hear of it in the next one
        assert results[1] is None
        assert [str(result) for result in ranks.step(gradients(2))] == ["rank 0: MemoryError: no room"] * RANKS
    assert all(isinstance(result, list) for result in ranks.step(gradients(3)))
