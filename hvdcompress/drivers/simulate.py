"""Any number of ranks in one process: their sessions stepped in lock-step. For tests, experiments and debugging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import traffic
from ..core import AllGather, AllReduce, AllToAll, Array, Collective, Group, Layout, Reducer
from ..session import Session

Tamper = Callable[[int, int, list[Any]], None]


class Simulation:
    """The sessions of all ranks.

    Args:
        reducer: the method, or one for each rank.
        layouts: of the buckets, or one layout.
        size: number of ranks.
        seed: of the random draws.
        tamper: called with (bucket, stage, the requests of all ranks), which it may change, before each collective.

    >>> import numpy as np
    >>> from hvdcompress import Dense, Layout
    >>> simulation = Simulation(Dense(), Layout.of([("w", (2,))]), size=2)
    >>> [mean.tolist() for mean in simulation.step([[np.float32([1, 2])], [np.float32([3, 4])]])]
    [[2.0, 3.0]]
    """

    def __init__(
        self,
        reducer: Reducer | Sequence[Reducer],
        layouts: Layout | Sequence[Layout],
        size: int,
        seed: int = 0,
        tamper: Tamper | None = None,
    ):
        layouts = [layouts] if isinstance(layouts, Layout) else list(layouts)
        reducers = list(reducer) if isinstance(reducer, Sequence) else [reducer] * size
        self.sessions = [Session(r, layouts, Group(rank, size, seed)) for rank, r in enumerate(reducers)]
        self.tamper = tamper
        records = [session.handshake() for session in self.sessions]
        for session in self.sessions:
            session.check_handshake(records)

    def step(self, grads: Sequence[Sequence[Array]], lr: float | None = None) -> list[Array] | None:
        """One step. `grads[rank][bucket]` is float32[layout.size].

        Returns:
            The mean of each bucket, as rank 0 has it; None if the step was abandoned.

        Raises:
            CompressionError: as every rank of a real job would.
            AssertionError: two ranks do not have the same bits.
        """
        results = self.step_each(grads, lr)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            raise errors[0]
        means: list[Array] | None = results[0]
        for rank, others in enumerate(results):
            for bucket, (mean, first) in enumerate(zip(others or (), means or ())):
                np.testing.assert_array_equal(
                    mean.view(np.uint32), first.view(np.uint32), f"ranks 0 and {rank} differ in bucket {bucket}"
                )
        return means

    def step_each(self, grads: Sequence[Sequence[Array]], lr: float | None = None) -> list[Any]:
        """One step; for each rank the means, None or the error that it ended with."""
        sessions = self.sessions
        for session in sessions:
            session.count(traffic.dense(sum(4 * layout.size for layout in session.layouts), session.group.size))
        requests: dict[int, list[Any]] = {
            bucket: [session.start(bucket, grads[rank][bucket], lr) for rank, session in enumerate(sessions)]
            for bucket in range(len(sessions[0].layouts))
        }
        records = [session.record() for session in sessions]
        goes_on = [session.agree(records) for session in sessions]
        stage = 0
        while requests:
            under_way, requests = requests, {}
            for bucket, asked in under_way.items():
                if self.tamper:
                    self.tamper(bucket, stage, asked)
                replies = execute(asked)
                if all(goes_on):
                    following = [session.advance(bucket, reply) for session, reply in zip(sessions, replies)]
                    if following[0] is not None:
                        requests[bucket] = following
            stage += 1
        return [_result(session) for session in sessions]

    def arrays(self, rank: int, bucket: int = 0) -> Mapping[str, Any]:
        """A rank's memory."""
        return self.sessions[rank].states[bucket].arrays


def execute(asked: Sequence[Collective]) -> list[Any]:
    """The replies to one collective, of which `asked` holds each rank's part."""
    kinds = {type(request) for request in asked}
    assert len(kinds) == 1, f"the ranks ask for different collectives: {asked}"
    first = asked[0]
    if isinstance(first, AllGather):
        payloads = [request.payload for request in asked]  # type: ignore[union-attr]
        return [payloads] * len(asked)
    if isinstance(first, AllToAll):
        return [[request.payloads[rank] for request in asked] for rank in range(len(asked))]  # type: ignore[union-attr]
    assert isinstance(first, AllReduce)
    total = first.array.copy()
    for request in asked[1:]:
        array = request.array  # type: ignore[union-attr]
        total = total + array if first.op == "sum" else np.maximum(total, array)
    return [total] * len(asked)


def _result(session: Session) -> Any:
    try:
        return session.finish()
    except Exception as error:
        return error
