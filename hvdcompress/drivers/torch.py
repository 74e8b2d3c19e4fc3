"""Executes collectives with Horovod's PyTorch operations, under names of the compressor's own.

Horovod remembers what the ranks have agreed on of an allgather or alltoall, and then makes it with a rank that has called
`hvd.join()` too, where it never ends; what it has to agree on it refuses. So none has the shape that it had the last time.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch

from .. import frame
from ..core import AllReduce, AllToAll, Collective
from ..errors import CompressionError
from .blocking import STATUS

SHORTEST_PAUSE, LONGEST_PAUSE = 5e-5, 2e-3  # seconds, between two looks at whether a collective is done


class Handle(NamedTuple):
    request: Collective
    number: int  # Horovod's
    buffers: tuple[torch.Tensor, ...]  # what Horovod reads from until the collective is done


class Transport:
    """Collectives over a process set.

    Args:
        prefix: of the names, the same on all ranks and no other compressor's.
        process_set: who takes part.
    """

    def __init__(self, prefix: str, process_set: Any):
        self._prefix, self._set = prefix, process_set
        self._renewed = 0
        self._turns: dict[str, int] = defaultdict(int)
        self._left: list[Handle] = []  # Horovod may still read their buffers

    def leave_behind(self, handles: Iterable[Handle]) -> None:
        """Nobody waits for these any more; those that follow have other names, but for the records."""
        left, self._left = [*self._left, *handles], []
        for handle in left:
            if not self.done(handle):
                self._left.append(handle)
                continue
            with contextlib.suppress(hvd.HorovodInternalError):
                hvd.synchronize(handle.number)  # Horovod forgets it
        self._renewed += 1

    def submit(self, request: Collective, name: str) -> Handle:
        renewed = f".again{self._renewed}" if self._renewed and name != STATUS else ""
        where: dict[str, Any] = {"name": f"{self._prefix}{renewed}.{name}", "process_set": self._set}
        if isinstance(request, AllReduce):
            array = torch.from_numpy(request.array)
            operation = {"sum": hvd.Sum, "max": hvd.Max}[request.op]
            return Handle(request, hvd.allreduce_async(array, op=operation, **where), (array,))
        turn = self._turns[name] = 1 - self._turns[name]
        if isinstance(request, AllToAll):
            sent = _turned(torch.from_numpy(np.concatenate(request.payloads)), turn)
            splits = torch.tensor([p.size for p in request.payloads], dtype=torch.int32)
            return Handle(request, hvd.alltoall_async(sent, splits, **where), (sent, splits))
        payload = _turned(torch.from_numpy(request.payload), turn)
        return Handle(request, hvd.allgather_async(payload, **where), (payload,))

    def done(self, handle: Handle) -> bool:
        """True if `wait` would not block."""
        return bool(hvd.poll(handle.number))

    def earlier(self, handle: Handle, other: Handle) -> bool:
        self._pause_until(handle, other)
        return not self.done(other)

    def _pause_until(self, *handles: Handle) -> None:
        """Until one of them is done, at most an eighth too long. Horovod's own wait takes a quarter of a processor."""
        began = time.monotonic()
        while not any(map(self.done, handles)):
            waited = time.monotonic() - began
            time.sleep(min(max(waited / 8, SHORTEST_PAUSE), LONGEST_PAUSE))

    def wait(self, handle: Handle) -> Any:
        self._pause_until(handle)
        try:
            reply = hvd.synchronize(handle.number)
        except hvd.HorovodInternalError as error:
            if "Join" in str(error):
                raise CompressionError(
                    "a rank has called hvd.join(), which Horovod does not combine with what compression exchanges: pad the "
                    "data, or stop all ranks after the same number of steps"
                ) from error
            raise
        if isinstance(handle.request, AllReduce):
            return reply.numpy()
        if isinstance(handle.request, AllToAll):
            received, sizes = reply
            return np.split(received.numpy().reshape(-1), np.cumsum(sizes.numpy())[:-1])
        return frame.split(reply.numpy().reshape(-1), self._set.size())


def blocked() -> bool:
    """Whether a thread of this process waits for Horovod."""
    return any(map(_waits, sys._current_frames().values()))


def _waits(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in (hvd.synchronize.__code__, Transport._pause_until.__code__):
            return True
        frame = frame.f_back
    return False


def _turned(payload: torch.Tensor, turn: int) -> torch.Tensor:
    """uint8[n] or uint8[n, 1]."""
    return payload.reshape(-1, 1) if turn else payload
