"""What the adapters to the frameworks share: how tensors are cut into buckets, and what a user is told."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import options, settings
from .core import Layout, Reducer
from .errors import CompressionError
from .reducers import Dense
from .session import Session


class Tensor(NamedTuple):
    """What the cut into buckets goes by. No bucket has tensors of two owners."""

    name: str
    shape: tuple[int, ...]
    owner: Any = None


@dataclass(frozen=True)
class Cut:
    """How the tensors of a model are cut into buckets, and which of them travel dense.

    Args:
        whole_model: one bucket has everything; else buckets are cut, and small tensors are in none.
        bucket_mb: size of a bucket, in MiB of float32.
        dense_below: tensors of fewer elements, or of one dimension or none, are small.

    Raises:
        ValueError: an option is out of its range.
    """

    whole_model: bool
    bucket_mb: float = 4.0
    dense_below: int = 1000

    def __post_init__(self) -> None:
        options.number("bucket_mb", self.bucket_mb, 0, above=True)
        options.whole("dense_below", self.dense_below, 0)

    def small(self, shape: Sequence[int]) -> bool:
        """Whether a tensor is in no bucket."""
        return not self.whole_model and (len(shape) < 2 or math.prod(shape) < self.dense_below)

    def buckets(self, tensors: Iterable[Tensor]) -> tuple[list[int | None], list[Layout]]:
        """The bucket of each tensor, None for dense; and the buckets. In the order given, which is to be that of arrival."""
        where: list[int | None] = []
        members: list[list[tuple[str, tuple[int, ...]]]] = []
        room, last_owner = 0.0, None
        for name, shape, owner in tensors:
            if self.small(shape):
                where.append(None)
                continue
            if not members or (not self.whole_model and (room <= 0 or owner is not last_owner)):
                members.append([])
                room = self.bucket_mb * 2**20
            members[-1].append((name, shape))
            room, last_owner = room - 4 * math.prod(shape), owner
            where.append(len(members) - 1)
        return where, [Layout.of(bucket, number) for number, bucket in enumerate(members)]


def warn_of_nothing_saved(session: Session) -> None:
    """Says on rank 0 for which buckets compression sends no fewer bytes than a dense allreduce."""
    unsaved = session.unsaved()
    if unsaved and session.group.rank == 0 and not isinstance(session.reducer, Dense):
        share = sum(session.layouts[bucket].size for bucket in unsaved) / sum(layout.size for layout in session.layouts)
        warnings.warn(
            f"with {session.group.size} ranks {session.reducer} sends no fewer bytes than a dense allreduce for {len(unsaved)} "
            f"of {len(session.layouts)} buckets, {share:.0%} of what it is given: use another method or other options",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_of_abandoned(session: Session) -> None:
    """Says on rank 0, the first time, that a step has no mean, and what becomes of it."""
    if session.group.rank == 0 and session.abandoned == 1:
        what = f"a gradient of rank {', '.join(map(str, session.nonfinite))}" if session.nonfinite else "the mean"
        warnings.warn(
            f"{what} was not finite: all gradients of this step are NaN, on every rank, and no memory has moved. It is for the "
            "training to skip the step, as without compression, or for a loss scaler that the compressor is told of; "
            "stats().abandoned counts such steps",
            RuntimeWarning,
            stacklevel=2,
        )


def patience() -> float:
    """Seconds that a rank waits for the others' handshakes before it says so."""
    return settings.number("HVDCOMPRESS_HANDSHAKE_SECONDS", 20.0)


def warn_of_waiting() -> None:
    """Says that other ranks have not come to their first step."""
    warnings.warn(
        f"some rank has not begun to train with compression for {patience():g} s: is the same compression= given on every "
        "rank, and the process set to both the optimizer and the compressor?",
        RuntimeWarning,
        stacklevel=2,
    )


def second_momentum(method: Reducer, theirs: float) -> CompressionError | None:
    """An error if the optimizer has a momentum beside the method's own."""
    own = getattr(method, "momentum", 0)
    if not (own and theirs):
        return None
    return CompressionError(
        f"the optimizer has a momentum of {theirs:g} and {method} has {own}: momentum would be applied twice; use SGD with "
        "momentum=0, or give the compression momentum=0"
    )


def token(rank: int) -> list[float]:
    """What Horovod allreduces in place of a gradient: its outcome tells what was done to it, and among whom."""
    return [1.0, float((rank + 1) ** 2)]


def factor_of(reduced: Sequence[float], size: int) -> float:
    """What Horovod multiplied the mean by, from what became of the tokens: 1 for Average, the number of ranks for Sum.

    Raises:
        CompressionError: it is no such multiple of the mean over all ranks.
    """
    factor, mean_square = reduced[0], (size + 1) * (2 * size + 1) / 6
    if not (factor > 0 and abs(reduced[1] - factor * mean_square) <= 1e-3 * factor * mean_square):
        raise CompressionError(
            f"Horovod made {list(reduced)} of what should be in the proportion 1 to {mean_square:g}: use op=hvd.Average or "
            "hvd.Sum, give the optimizer's process set to the compressor as well, and do not call hvd.join() before all ranks "
            "have stopped"
        )
    return float(round(factor)) if abs(factor - round(factor)) < 1e-5 * factor else factor
