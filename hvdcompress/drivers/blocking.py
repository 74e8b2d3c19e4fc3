"""The order in which a driver that can wait moves a session's collectives. MPI's and PyTorch's drivers share it.

Every rank submits in the same order and waits in the same order: all buckets' collectives of a stage are under way
before the first of them is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..core import AllGather, Array, Collective
from ..session import Session

STATUS = "status"  # name of the records' allgather


class Transport(Protocol):
    """Moves the bytes of one collective; `submit` does not block."""

    def submit(self, request: Collective, name: str) -> Any: ...

    def wait(self, handle: Any) -> Any: ...

    def earlier(self, handle: Any, other: Any) -> bool:
        """Waits for one of two collectives; True if the reply to the first is there, and to the second not yet."""

    def leave_behind(self, handles: Iterable[Any]) -> None:
        """Nobody waits for these any more."""


def shake_hands(session: Session, transport: Transport) -> None:
    """Exchanges the first records; raises what `Session.check_handshake` does."""
    session.check_handshake(transport.wait(transport.submit(AllGather(session.handshake()), STATUS)))


def wind_up(
    session: Session, transport: Transport, pending: dict[int, Any], status: Any, limits: Sequence[float] = ()
) -> list[Array] | None:
    """Brings a step whose buckets are all started to its end; takes, returns and raises what `Session.finish` does.

    An error of the transport's own goes out as it is, and leaves the session before the step.

    Args:
        pending: the handle of each bucket's first collective.
        status: the handle of the status records' allgather.
    """
    began, busy = time.perf_counter(), session.seconds["decode"]
    try:
        ready: dict[int, Collective] = {}
        failure: Exception | None = None
        try:
            _decode_early(session, transport, pending, status, ready)
        except Exception as error:  # the records may say why
            failure = error
        goes_on = session.agree(transport.wait(status))
        if session.estranged:
            transport.leave_behind(pending.values())
            pending = {}
        elif failure is not None:
            raise failure
        stage, under_way = 1, {}
        if goes_on:
            under_way = {bucket: transport.submit(request, name(bucket, stage)) for bucket, request in ready.items()}
        while pending:
            for bucket in sorted(pending):
                reply = transport.wait(pending[bucket])
                request = session.advance(bucket, reply) if goes_on else None
                if request is not None:
                    under_way[bucket] = transport.submit(request, name(bucket, stage))
            stage, pending, under_way = stage + 1, under_way, {}
    except Exception:
        session.restart()
        raise
    session.seconds["wait"] += time.perf_counter() - began - (session.seconds["decode"] - busy)
    return session.finish(limits)


def _decode_early(
    session: Session, transport: Transport, pending: dict[int, Any], status: Any, ready: dict[int, Collective]
) -> None:
    """Takes out of `pending` the buckets whose first replies come before the records, and puts what they ask for next in `ready`.

    Nothing of that is submitted until the records are read, so that no rank goes on where another does not. The last
    bucket's reply is left: nothing is under way any more while it would be worked on.
    """
    for bucket in sorted(pending)[:-1]:
        if not transport.earlier(pending[bucket], status):
            return
        request = session.advance(bucket, transport.wait(pending.pop(bucket)))
        if request is not None:
            ready[bucket] = request


def name(bucket: int, stage: int) -> str:
    """Name of a bucket's collective."""
    return f"{bucket}.{stage}"
