"""Counts bytes: what is handed to each collective, and what a ring or a pairwise exchange then sends.

Counted is what the collectives carry: frames with their headers, scales, masks and padding, tokens, status records,
tensors that travel dense. Not counted is what MPI and Horovod say to each other beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .core import AllGather, AllReduce, AllToAll, Collective


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank.

    Attributes:
        payload: handed to collectives.
        wire: sent by this rank: an allreduce as a ring sends 2 (W - 1) / W of its array, an allgather as a ring sends all
            ranks' payloads but the next rank's, an alltoall sends what is for others.
        dense: what `wire` would be without compression, for the gradients in their own dtypes.
        paper: sent per worker, up and down, by the method's own accounting with a parameter server.
        paper_dense: the same without compression.
    """

    payload: float = 0
    wire: float = 0
    dense: float = 0
    paper: float = 0
    paper_dense: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def ratio(self) -> float | None:
        """`wire` over `dense`: what is left of the bytes. None where nothing was sent."""
        return self.wire / self.dense if self.dense else None

    @property
    def paper_ratio(self) -> float | None:
        """`paper` over `paper_dense`. None where nothing was sent."""
        return self.paper / self.paper_dense if self.paper_dense else None


def allreduced(nbytes: float, size: int) -> Traffic:
    """An allreduce of nbytes over `size` ranks."""
    return Traffic(payload=nbytes, wire=2 * nbytes * (size - 1) / size)


def dense(nbytes: float, size: int) -> Traffic:
    """What is saved: an allreduce of nbytes that did not take place."""
    return Traffic(dense=2 * nbytes * (size - 1) / size, paper_dense=2 * nbytes)


def exchanged(request: Collective, reply: object, rank: int, size: int) -> Traffic:
    """A reducer's collective, when its reply is there."""
    if isinstance(request, AllReduce):
        return allreduced(request.array.nbytes, size)
    if isinstance(request, AllToAll):
        own = request.payloads[rank].nbytes
        return Traffic(payload=sum(p.nbytes for p in request.payloads), wire=sum(p.nbytes for p in request.payloads) - own)
    assert isinstance(request, AllGather) and isinstance(reply, list)
    total, following = sum(p.nbytes for p in reply), reply[(rank + 1) % size].nbytes
    return Traffic(payload=request.payload.nbytes, wire=total - following)
