"""Elastic Horovod: what ranks that have changed exchange of their memories, and a compressor in `hvd.elastic.TorchState`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
from numpy.typing import NDArray

from .. import frame
from ..core import AllGather
from ..drivers.torch import Transport
from ..memory import Arrays
from ..session import ADDRESS

if TYPE_CHECKING:
    from .compressor import Compressor


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
            forms = theirs["arrays"]
            held = {**held, "arrays": Arrays(forms, partial(_broadcast, rank, forms, arrays, process_set))}
        brought.append(Brought(theirs["number"], held, theirs["changes"]))
    return brought


def _broadcast(rank: int, forms: Mapping[str, Any], own: Mapping[str, torch.Tensor], process_set: Any, name: str) -> NDArray[Any]:
    """A rank's array, on every rank that asks for it at the same time."""
    dtype, shape = forms[name]
    tensor = own[name] if process_set.rank() == rank else torch.from_numpy(np.empty(shape, dtype))
    root = process_set.ranks[rank] if process_set.ranks else rank
    name = f"hvdcompress.{process_set.process_set_id}.again.{name}"
    array: NDArray[Any] = hvd.broadcast(tensor, root_rank=root, name=name, process_set=process_set).numpy()
    return array


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
