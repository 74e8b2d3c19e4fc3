"""Elastic Horovod: what ranks that have changed exchange of their memories, and a compressor in `hvd.elastic.TorchState`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
from numpy.typing import NDArray

from .. import frame
from ..core import AllGather
from ..drivers.torch import Transport

if TYPE_CHECKING:
    from .compressor import Compressor


ADDRESS = frame.Address(frame.STATUS, 0, 0, 0)


class Brought(NamedTuple):
    """What a rank comes with.

    Attributes:
        number: the next one free for a compressor.
        memory: in the form of `hvdcompress.memory`, empty if it has none.
        changes: of the method's options.
    """

    number: int
    memory: Mapping[str, Any]
    changes: dict[str, Any]


def exchange(memory: Mapping[str, Any], number: int, changes: Mapping[str, Any], process_set: Any) -> list[Brought]:
    """What every rank comes with; of a memory's arrays, each is sent when all ranks ask for it."""
    arrays = memory.get("arrays", {})
    own = {
        "number": number,
        "changes": dict(changes),
        "memory": {name: value for name, value in memory.items() if name != "arrays"},
        "arrays": {name: [str(array.numpy().dtype), list(array.shape)] for name, array in arrays.items()},
    }
    transport = Transport(f"hvdcompress.{process_set.process_set_id}.again", process_set)
    payload = frame.pack(ADDRESS, np.frombuffer(json.dumps(own, default=str).encode(), np.uint8))
    frames = transport.wait(transport.submit(AllGather(payload), "heads"))
    brought = []
    for rank, buffer in enumerate(frames):
        theirs = json.loads(frame.unpack(buffer, ADDRESS, rank).tobytes())
        held = theirs["memory"]
        if held:
            held = {**held, "arrays": _Arrays(rank, theirs["arrays"], arrays, process_set)}
        brought.append(Brought(theirs["number"], held, theirs["changes"]))
    return brought


class _Arrays(Mapping[str, NDArray[Any]]):
    """A rank's arrays, broadcast one by one: those of all ranks together may be more than there is room for."""

    def __init__(self, rank: int, forms: Mapping[str, tuple[str, list[int]]], own: Mapping[str, torch.Tensor], process_set: Any):
        self._rank, self._forms, self._own, self._set = rank, forms, own, process_set

    def __getitem__(self, name: str) -> NDArray[Any]:
        dtype, shape = self._forms[name]
        mine = self._set.rank() == self._rank
        tensor = self._own[name] if mine else torch.from_numpy(np.empty(shape, dtype))
        root = self._set.ranks[self._rank] if self._set.ranks else self._rank
        name = f"hvdcompress.{self._set.process_set_id}.again.{name}"
        array: NDArray[Any] = hvd.broadcast(tensor, root_rank=root, name=name, process_set=self._set).numpy()
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)


class CompressorHandler(StateHandler):  # type: ignore[misc]
    """Keeps a compressor in `hvd.elastic.TorchState`: memory is committed and restored, and follows the ranks.

    Without it, Horovod would give every rank a copy of rank 0's.
    """

    def __init__(self, compressor: Compressor):
        super().__init__(compressor)
        self.save()

    def save(self) -> None:
        self._saved = self.value.committed()

    def restore(self) -> None:
        self.value.begin_anew(*self._saved)

    def sync(self) -> None:
        self.value.meet_again()
        self.save()


def keep_in_elastic_states(kind: type[Compressor]) -> None:
    """Tells Horovod of the handler."""
    set_handler_registry([*get_handler_registry(), (kind, CompressorHandler)])
