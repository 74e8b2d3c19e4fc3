"""Each rank's memory in a file of its own, without pickle, and how a training goes on from them.

    checkpoint.save(compression, directory)  # on every rank, beside the model's own checkpoint
    ...
    checkpoint.restore(compression, directory)  # on every rank, before the first step

The same number of ranks goes on bit for bit, and each rank needs its own file only. Another number of ranks needs the files
of all ranks, in a directory that every rank sees; `hvdcompress.memory` says what becomes of them. The weights are the
caller's to save and load, and are of the same step.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .core import Reducer
from .errors import CompressionError
from .memory import RANKS, Arrays, check, redistributed


class Compressor(Protocol):
    """What the adapters' compressors offer."""

    method: Reducer

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def fail(self, error: CompressionError) -> None: ...


def save(compression: Compressor, directory: str | os.PathLike[str], **further: Any) -> Path:
    """Writes this rank's memory to `compression-<rank>.npz`, in place of what was there, as a whole.

    Args:
        compression: a compressor, of PyTorch's adapter or TensorFlow's.
        directory: not necessarily common to the hosts.
        further: what else `restore` is to find, such as the epoch: numbers, strings, lists of them.
    """
    path, arrays = path_of(directory, compression.place[0]), {}

    def without_arrays(node: Any, where: str) -> Any:
        if isinstance(node, Mapping):
            return {name: without_arrays(value, f"{where}/{name}") for name, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [without_arrays(value, f"{where}/{number}") for number, value in enumerate(node)]
        if isinstance(node, (int, float, str)):
            return node
        arrays[where] = np.asarray(node)
        if arrays[where].dtype.hasobject:
            raise TypeError(f"{where} is a {type(node).__name__}, which is not saved: numbers, strings and arrays are")
        return {ARRAY: where}

    text = json.dumps({"further": further, "memory": without_arrays(compression.state_dict(), "memory")})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **{TEXT: np.frombuffer(text.encode(), np.uint8), **arrays})
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def restore(compression: Compressor, directory: str | os.PathLike[str], **expected: Any) -> bool:
    """Takes up what `save` has written; the ranks then find out in their first step whether they all have.

    Args:
        expected: what `save` must have been given, such as the epoch.

    Returns:
        False if there is nothing in the directory for this rank: its memory is then empty, as before a first step.

    An error does not raise here: every rank raises it, as a CompressionError, in the first step. A file cannot be read, is of
    another training than this or was saved with something else than `expected`; or with another number of ranks some are
    not there, or not of one step.
    """
    rank, size = compression.place
    own = path_of(directory, rank)
    # Rank 0's is of the latest training in a directory: of ranks that there are no longer, files may be left.
    here = [path for path in (path_of(directory, 0), own) if path.exists()]
    if not here:
        return False
    read = cache(lambda path: _read(path, expected))
    try:
        before = _ranks(read(here[0]), size)
        if before == size and own.exists():
            compression.load_state_dict(_loaded(read(own)))
        else:
            paths = [path_of(directory, old) for old in range(before)]
            for path in paths:
                if not path.exists():
                    raise CompressionError(
                        f"{here[0]} was saved by one of {before} ranks, {path.name} is missing, and there are {size} ranks now: "
                        "put the files of all ranks into one directory that every rank sees; or begin with an empty memory, in "
                        "another directory"
                    )
            compression.load_state_dict(_redistributed([read(path) for path in paths], compression))
    except Exception as error:  # whatever is wrong with a file, all ranks are to hear of it
        told = error if isinstance(error, CompressionError) else CompressionError(f"{here[0]} cannot be taken up: {error}")
        compression.fail(told)
    return True


def _redistributed(memories: list[dict[str, Any]], compression: Compressor) -> dict[str, Any]:
    every = [_sets(memory) for memory in memories]
    if len({len(sets) for sets in every}) > 1:
        raise CompressionError("the memories are not of one training: they have not the same sets of variables")
    new = [redistributed(ranks, compression.method, *compression.place) for ranks in zip(*every)]
    return {"sets": new} if "sets" in memories[0] else new[0] if new else {}


def path_of(directory: str | os.PathLike[str], rank: int) -> Path:
    """The file of a rank."""
    return Path(directory) / f"compression-{rank}.npz"


TEXT, ARRAY = "text", "array"  # the member of a file that has all but arrays, and what stands in it for one of them


def _array(path: Path, members: Mapping[str, str], name: str) -> NDArray[Any]:
    with _explained(path), path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        array: NDArray[Any] = file[members[name]]
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Makes a CompressionError of whatever is wrong with a file."""
    try:
        yield
    except CompressionError:
        raise
    except Exception as error:
        raise CompressionError(f"{path} is no memory of a compressor, or cut: {error}") from error


def _read(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's memory; its arrays are read when they are asked for."""
    with _explained(path):
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            whole = json.loads(file[TEXT].tobytes())
        further, memory = whole["further"], whole["memory"]
        for one in _sets(memory):
            members = {name: marker[ARRAY] for name, marker in one["arrays"].items()}
            one["arrays"] = Arrays(members, partial(_array, path, members))
            check(one)
    for name, value in expected.items():
        if further.get(name) != value:
            raise CompressionError(
                f"{path} was saved with {name}={further.get(name)}, and {name}={value} is wanted: load weights and memory of one "
                "checkpoint, or take another directory"
            )
    return memory  # type: ignore[no-any-return]


def _sets(memory: dict[str, Any]) -> list[dict[str, Any]]:
    """The memories in what a compressor's `state_dict` gives: of TensorFlow's, one for each set of variables."""
    sets: list[dict[str, Any]] = memory.get("sets", [memory] if memory else [])
    return sets


def _ranks(memory: dict[str, Any], default: int) -> int:
    """How many there were; the default where nothing was saved of them."""
    return max((int(one["facts"][RANKS]) for one in _sets(memory)), default=default)


def _loaded(memory: dict[str, Any]) -> dict[str, Any]:
    for one in _sets(memory):
        one["arrays"] = dict(one["arrays"])
    return memory
