"""Elastic Horovod: what ranks that have changed exchange of their memories, and a compressor in `hvd.elastic.TorchState`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.torch as hvd
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry

if TYPE_CHECKING:
    from .compressor import Compressor


class Brought(NamedTuple):
    """What a rank comes with.

    Attributes:
        number: the next one free for a compressor.
        memory: in the form of `hvdcompress.memory`, of torch tensors; empty if it has none.
    """

    number: int
    memory: Mapping[str, Any]


def exchange(memory: Mapping[str, Any], number: int, process_set: Any) -> list[Brought]:
    """What every rank comes with; of a memory's arrays, each is sent when all ranks ask for it."""
    head = {name: value for name, value in memory.items() if name != "arrays"}
    heads = hvd.allgather_object(
        (number, head, list(memory.get("arrays", ()))), name="hvdcompress.heads", process_set=process_set
    )
    return [
        Brought(theirs, {**known, "arrays": _Arrays(rank, names, memory.get("arrays", {}), process_set)} if known else {})
        for rank, (theirs, known, names) in enumerate(heads)
    ]


class _Arrays(Mapping[str, Any]):
    """A rank's arrays, broadcast one by one: those of all ranks together may be more than there is room for."""

    def __init__(self, rank: int, names: list[str], own: Mapping[str, Any], process_set: Any):
        self._rank, self._names, self._own, self._set = rank, names, own, process_set

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        root = self._set.ranks[self._rank] if self._set.ranks else self._rank
        return hvd.broadcast_object(
            self._own[name].numpy() if self._set.rank() == self._rank else None,
            root_rank=root,
            name=f"hvdcompress.{name}",
            process_set=self._set,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class CompressorHandler(StateHandler):  # type: ignore[misc]
    """Keeps a compressor in `hvd.elastic.TorchState`: memory is committed and restored, and follows the ranks.

    Without it, Horovod would give every rank a copy of rank 0's.
    """

    def __init__(self, compressor: Compressor):
        super().__init__(compressor)
        self.save()

    def save(self) -> None:
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.begin_anew(self._saved)

    def sync(self) -> None:
        self.value.meet_again()
        self.save()


def keep_in_elastic_states(kind: type[Compressor]) -> None:
    """Tells Horovod of the handler."""
    set_handler_registry([*get_handler_registry(), (kind, CompressorHandler)])
