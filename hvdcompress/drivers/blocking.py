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
        goes_on, stage = session.agree(transport.wait(status)), 0
        if session.estranged:
            transport.leave_behind(pending.values())
            pending = {}
        while pending:
            stage, under_way, pending = stage + 1, pending, {}
            for bucket in sorted(under_way):
                reply = transport.wait(under_way[bucket])
                request = session.advance(bucket, reply) if goes_on else None
                if request is not None:
                    pending[bucket] = transport.submit(request, name(bucket, stage))
    except Exception:
        session.restart()
        raise
    session.seconds["wait"] += time.perf_counter() - began - (session.seconds["decode"] - busy)
    return session.finish(limits)


def name(bucket: int, stage: int) -> str:
    """Name of a bucket's collective."""
    return f"{bucket}.{stage}"
