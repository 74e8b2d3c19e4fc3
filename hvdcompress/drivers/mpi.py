"""mpi4py: compressed means of lists of NumPy arrays, for those who train without Horovod.

    from mpi4py import MPI
    from hvdcompress import Dore
    from hvdcompress.drivers.mpi import DistributedMean

    mean = DistributedMean(Dore(), MPI.COMM_WORLD)
    grads = mean(grads)                 # in every step, on every rank

All communication is non-blocking, on a communicator of its own. A peer that dies ends the job: MPI's default error
handler aborts it. Start with `python -m mpi4py script.py`, so that an exception on one rank does so too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from .. import traffic, watch
from ..core import AllGather, AllReduce, AllToAll, Collective, Group, Layout, Reducer
from ..errors import CompressionError
from ..session import Session
from . import blocking


class DistributedMean:
    """The mean over ranks of a list of arrays, in step after step.

    Args:
        method: a reducer.
        comm: the ranks that take part; it is duplicated.
        seed: of the random draws, the same on all ranks.

    Calling it:
        grads: arrays of any real float dtype and any shapes; the shapes are those of the first call, on every rank.
        lr: the learning rate of the step, for methods that ask for it.
        Returns the means, in the shapes and dtypes of `grads`. They are NaN, on every rank, where a gradient is not
        finite on some rank; the memory is then as it was.

    Raises:
        CompressionError: a rank failed, or the ranks do not agree; on every rank.
    """

    def __init__(self, method: Reducer, comm: MPI.Comm = MPI.COMM_WORLD, seed: int = 0):
        self.method, self.seed = method, seed
        self._transport = Transport(comm.Dup())
        self.session: Session | None = None

    def __call__(self, grads: Sequence[NDArray[Any]], lr: float | None = None) -> list[NDArray[Any]]:
        grads = [np.asarray(grad) for grad in grads]
        shapes, others = tuple(grad.shape for grad in grads), {str(g.dtype) for g in grads if g.dtype.kind != "f"}
        error = CompressionError(f"gradients must be of a float dtype, not {', '.join(sorted(others))}") if others else None
        session = self._session(shapes, error)
        if shapes != session.layouts[0].shapes:
            error = CompressionError(f"the shapes {shapes} are not those of the first step, {session.layouts[0].shapes}")
        if error is not None:
            session.fail(error)
            grads = [np.zeros(shape, np.float32) for shape in session.layouts[0].shapes]
        flat = np.concatenate([np.zeros(0, np.float32), *(np.ravel(grad).astype(np.float32) for grad in grads)])
        size = session.group.size
        session.count(traffic.dense(sum(grad.nbytes for grad in grads), size))
        pending = {0: self._transport.submit(session.start(0, flat, lr), blocking.name(0, 0))}
        status = self._transport.submit(AllGather(session.record()), blocking.STATUS)
        means = blocking.wind_up(session, self._transport, pending, status)
        mean = means[0] if means is not None else np.full(flat.size, np.nan, np.float32)
        slices = session.layouts[0].slices.values()
        return [mean[where].reshape(grad.shape).astype(grad.dtype) for where, grad in zip(slices, grads)]

    def _session(self, shapes: Sequence[tuple[int, ...]], error: CompressionError | None) -> Session:
        if self.session is None:
            comm = self._transport.comm
            layout = Layout.of((str(i), shape) for i, shape in enumerate(shapes))
            session = Session(self.method, [layout], Group(comm.rank, comm.size, self.seed))
            if error is not None:
                session.fail(error)
            watch.over(session)
            blocking.shake_hands(session, self._transport)
            self.session = session
        return self.session


class Handle(NamedTuple):
    request: Collective
    under_way: MPI.Request
    buffers: tuple[NDArray[Any], ...]


class Transport:
    """Executes collectives on a communicator.

    An exchange of payloads is two collectives, sizes and bytes; `submit` starts the first and `wait` the second, both
    in an order that is the same on all ranks.
    """

    def __init__(self, comm: MPI.Comm):
        self.comm = comm
        self._left: list[Handle] = []  # MPI may still read their buffers

    def leave_behind(self, handles: Iterable[Handle]) -> None:
        self._left += handles

    def submit(self, request: Collective, name: str) -> Handle:
        if isinstance(request, AllReduce):
            total = np.empty_like(request.array)
            under_way = self.comm.Iallreduce(request.array, total, {"sum": MPI.SUM, "max": MPI.MAX}[request.op])
            return Handle(request, under_way, (total,))
        sizes = np.empty(self.comm.size, np.int64)
        if isinstance(request, AllToAll):
            own = np.array([p.size for p in request.payloads], np.int64)
            return Handle(request, self.comm.Ialltoall(own, sizes), (own, sizes))
        own = np.array([request.payload.size], np.int64)
        return Handle(request, self.comm.Iallgather(own, sizes), (own, sizes))

    def earlier(self, handle: Handle, other: Handle) -> bool:
        return False  # what comes earlier on one rank may not on another, and `wait` has an order

    def wait(self, handle: Handle) -> Any:
        handle.under_way.Wait()
        if isinstance(handle.request, AllReduce):
            return handle.buffers[0]
        own, sizes = handle.buffers
        received = np.empty(sizes.sum(), np.uint8)
        target = [received, (sizes, _starts(sizes)), MPI.BYTE]
        if isinstance(handle.request, AllToAll):
            sent = np.concatenate(handle.request.payloads)
            self.comm.Ialltoallv([sent, (own, _starts(own)), MPI.BYTE], target).Wait()
        else:
            self.comm.Iallgatherv([handle.request.payload, MPI.BYTE], target).Wait()
        return np.split(received, np.cumsum(sizes)[:-1])


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])
