"""Keras callbacks: compression in `model.fit`.

    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvc.Compression.dore())
    model.compile(optimizer, ...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), CompressionCallback()])

Callbacks that read `logs` (TensorBoard, CSVLogger) come after `CompressionCallback` in the list, Horovod's
MetricAverageCallback before it; History and the progress bar see its figures wherever it stands.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from .errors import CompressionError
from .schedule import ByEpoch, Schedule
from .tensorflow import Compressor, attach
from .tensorflow.binding import bound_to
from .tensorflow.compressor import NO_XLA

__all__ = ["CompressionCallback", "CompressionCheckpoint", "CompressionSchedule"]


class CompressionCallback(tf.keras.callbacks.Callback):
    """Binds the compressor to the model's optimizer, resets it, and tells what compression does.

    In the `logs` of each epoch:
        compression_ratio: bytes that this rank sent over those of dense Horovod, in the epoch; 1 where nothing was sent.
        compression_bytes: that this rank sent in a step, on the average of the epoch.
        compression_residual: l2 norm of what this rank keeps of gradients that have not been applied, at its end.

    Args:
        compression: the compressor; by default the one that Horovod's optimizer was given.
        reset: empties the memory after the first batch of a training that begins anew: it belongs to weights that Horovod's
            BroadcastGlobalVariablesCallback then replaces.

    Raises:
        ValueError: at the beginning of `fit`: the model's optimizer is none of Horovod's, has no compressor, or is combined
            with what compression does not support.
    """

    def __init__(self, compression: Compressor | None = None, reset: bool = True):
        super().__init__()
        self.compression, self.reset = compression, reset
        self._to_reset = False
        self._supports_tf_logs = True  # else Keras waits for every batch's figures, which are not looked at

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.jit_compile:
            raise ValueError(NO_XLA)
        before = bound_to(self.model.optimizer)
        attach(self.model.optimizer, self.compression)
        self.compression = _compressor_of(self.model)
        if before is not self.compression:
            # What was traced before, in another fit, has no compressor in it, or another.
            self.model.train_function = self.model.make_train_function(force=True)
        self._to_reset = self.reset and self.compression.stats().steps == 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._to_reset:
            self._to_reset = False
            _compressor_of(self.model).reset()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at_begin = _compressor_of(self.model).stats()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        compressor, begin = _compressor_of(self.model), self._at_begin
        end = compressor.stats()
        steps = end.steps + end.abandoned - begin.steps - begin.abandoned
        wire, dense = end.total.wire - begin.total.wire, end.total.dense - begin.total.dense
        if logs is not None:
            logs["compression_ratio"] = wire / dense if dense else 1.0
            logs["compression_bytes"] = wire / steps if steps else 0.0
            logs["compression_residual"] = compressor.residual_norm()


class CompressionSchedule(tf.keras.callbacks.Callback):
    """Changes options of the method from epoch to epoch; nothing is traced anew.

    `CompressionSchedule(ratio={0: 0.2, 3: 0.05})`, or `CompressionSchedule(budget=lambda epoch: 3 if epoch < 5 else 1)`. It
    comes after `CompressionCallback`, where there is one.

    Args:
        options: as `hvdcompress.schedule.Schedule` takes them.

    Raises:
        ValueError: at the beginning of an epoch: an option is unknown, out of its range, or cannot be changed in training.
    """

    def __init__(self, **options: ByEpoch):
        super().__init__()
        self._schedule = Schedule(options)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        _compressor_of(self.model).change(**self._schedule(epoch))


class CompressionCheckpoint(tf.keras.callbacks.Callback):
    """Saves each rank's memory after each epoch, and takes it up when training begins again.

    Weights and optimizer are saved by Keras's own callbacks; both belong to the same epoch. It comes after
    `CompressionCallback`, where there is one.

    Args:
        directory: where `compression-<rank>.npz` is kept, replaced as a whole; not necessarily common to the hosts.
        resume: takes up what is there when training begins, if this training has made no step yet.

    Raises:
        CompressionError: at the beginning of `fit`, the file is no memory; in the first step, on every rank, it is of another
            training, or the ranks' files are not of the same step.
    """

    def __init__(self, directory: str | os.PathLike[str], resume: bool = True):
        super().__init__()
        self.directory, self.resume = Path(directory), resume

    def on_train_begin(self, logs: Any = None) -> None:
        path, compressor = self._path(), _compressor_of(self.model)
        if self.resume and path.exists() and compressor.stats().steps == 0:
            compressor.load_state_dict(load(path))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        save(_compressor_of(self.model).state_dict(), self._path())

    def _path(self) -> Path:
        import horovod.tensorflow as hvd

        return self.directory / f"compression-{hvd.rank()}.npz"


def save(memory: dict[str, Any], path: Path) -> None:
    """Writes a rank's memory, as `Compressor.state_dict` gives it, as an .npz file; what was there is replaced at the end."""
    sets = [{key: value for key, value in one.items() if key != "arrays"} for one in memory["sets"]]
    arrays = {f"{number}/{name}": array for number, one in enumerate(memory["sets"]) for name, array in one["arrays"].items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, sets=np.frombuffer(json.dumps(sets).encode(), np.uint8), **arrays)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Reads what `save` has written.

    Raises:
        CompressionError: it is no such file, or cut.
    """
    try:
        with np.load(path) as file:
            sets = json.loads(file["sets"].tobytes())
            for number, one in enumerate(sets):
                own = f"{number}/"
                one["arrays"] = {name.removeprefix(own): file[name] for name in file.files if name.startswith(own)}
    except Exception as error:
        raise CompressionError(f"{path} is no memory of a compressor, or cut: {error}") from error
    return {"sets": sets}


def _compressor_of(model: Any) -> Compressor:
    compressor = bound_to(model.optimizer)
    if compressor is None:
        raise ValueError(
            "the model's optimizer has no compressor bound to it: give hvd.DistributedOptimizer a compression= of "
            "hvdcompress.tensorflow, and put CompressionCallback() before the other callbacks of hvdcompress"
        )
    return compressor
