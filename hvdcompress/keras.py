"""Keras: callbacks for compression in `model.fit`, and models that are loaded.

    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvc.Compression.dore())
    model.compile(optimizer, ...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), CompressionCallback()])

Callbacks that read `logs` (TensorBoard, CSVLogger) come after `CompressionCallback` in the list, Horovod's
MetricAverageCallback before it; History and the progress bar see its figures wherever it stands.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from . import checkpoint
from .schedule import ByEpoch, Schedule
from .tensorflow import Compressor, DistributedOptimizer, attach
from .tensorflow.binding import bound_to
from .tensorflow.compressor import NO_XLA
from .tensorflow.reduction import inner_of, is_loss_scaled

__all__ = ["CompressionCallback", "CompressionCheckpoint", "CompressionSchedule", "load_model"]


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
        bind: False where the model's own `train_step` has a tape to which `compression` is bound.

    Raises:
        ValueError: at the beginning of `fit`: the model's optimizer is none of Horovod's, has no compressor, or is combined
            with what compression does not support.
    """

    def __init__(self, compression: Compressor | None = None, reset: bool = True, bind: bool = True):
        super().__init__()
        if compression is None and not bind:
            raise ValueError("bind=False needs the compressor: CompressionCallback(compression, bind=False)")
        self.compression, self.reset, self.bind = compression, reset, bind
        self._known: list[Any] | None = None  # sets of variables that were there before the first batch
        self._supports_tf_logs = True  # else Keras waits for every batch's figures, which are not looked at

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.jit_compile:
            raise ValueError(NO_XLA)
        if self.bind:
            before = bound_to(self.model.optimizer)
            attach(self.model.optimizer, self.compression)
            if before is not bound_to(self.model.optimizer):
                # What was traced before, in another fit, has no compressor in it, or another.
                self.model.train_function = self.model.make_train_function(force=True)
        self._known = list(self._compressor().reductions) if self.reset else None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._known is not None:
            for reduction in self._compressor().reductions:
                if reduction not in self._known and not reduction.resumed:
                    reduction.session.reset()
            self._known = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at_begin = self._compressor().stats()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        compressor, begin = self._compressor(), self._at_begin
        end = compressor.stats()
        steps = end.counted - begin.counted
        wire, dense = end.total.wire - begin.total.wire, end.total.dense - begin.total.dense
        if not steps and self.bind and _must_have_averaged(self.model.optimizer):
            warnings.warn(
                "no gradient was averaged in this epoch: Horovod's optimizers average in minimize(), so a train_step that calls "
                "apply_gradients() needs a DistributedGradientTape",
                RuntimeWarning,
                stacklevel=2,
            )
        if logs is not None:
            logs["compression_ratio"] = wire / dense if dense else 1.0
            logs["compression_bytes"] = wire / steps if steps else 0.0
            logs["compression_residual"] = compressor.residual_norm()

    def _compressor(self) -> Compressor:
        return _compressor_of(self.model, None if self.bind else self.compression)


class CompressionSchedule(tf.keras.callbacks.Callback):
    """Changes options of the method from epoch to epoch; nothing is traced anew.

    `CompressionSchedule(ratio={0: 0.2, 3: 0.05})`, or `CompressionSchedule(budget=lambda epoch: 3 if epoch < 5 else 1)`. It
    comes after `CompressionCallback`, where there is one.

    Args:
        compression: the compressor; by default the one that the model's optimizer is bound to.
        options: as `hvdcompress.schedule.Schedule` takes them.

    Raises:
        ValueError: at the beginning of an epoch: an option is unknown, out of its range, or cannot be changed in training.
    """

    def __init__(self, compression: Compressor | None = None, **options: ByEpoch):
        super().__init__()
        self.compression, self._schedule = compression, Schedule(options)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        _compressor_of(self.model, self.compression).change(**self._schedule(epoch))


class CompressionCheckpoint(tf.keras.callbacks.Callback):
    """Saves each rank's memory after each epoch, and takes it up when training begins again.

    Weights and optimizer are saved by Keras's own callbacks, and loaded on every rank; all are of the same epoch. It comes
    after `CompressionCallback`, where there is one. Another number of ranks may go on, see `hvdcompress.checkpoint`.

    Args:
        directory: where `compression-<rank>.npz` is kept, replaced as a whole; not necessarily common to the hosts.
        resume: takes up what is there when training begins, if this training has made no step yet.
        compression: the compressor; by default the one that the model's optimizer is bound to.

    Raises:
        CompressionError: in the first step, on every rank: a rank's file cannot be read, is of another training, was not
            written just before the first epoch of this `fit` (`initial_epoch`), or the ranks' files are not of the same step.
    """

    def __init__(self, directory: str | os.PathLike[str], resume: bool = True, compression: Compressor | None = None):
        super().__init__()
        self.directory, self.resume, self.compression = Path(directory), resume, compression
        self._begins = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        compressor = _compressor_of(self.model, self.compression)
        if self._begins and self.resume and compressor.stats().steps == 0:
            checkpoint.restore(compressor, self.directory, initial_epoch=epoch)
        self._begins = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        checkpoint.save(_compressor_of(self.model, self.compression), self.directory, initial_epoch=epoch + 1)


def load_model(
    path: str | os.PathLike[str], compression: Any, *, custom_objects: Mapping[str, Any] | None = None, **options: Any
) -> tf.keras.Model:
    """Loads a model whose optimizer is Horovod's, with a compressor bound to it, in the state in which it was saved.

    Horovod's own `load_model` fails for learning rates with a schedule and for files of Keras's format, or leaves their
    optimizer as it is. Every rank loads; what `model.save` writes has nothing of ours, and the compressor's memory is saved
    by `CompressionCheckpoint`.

    Args:
        path: .keras or .h5, whether or not the optimizer was Horovod's when it was saved.
        compression, options: as `hvdcompress.tensorflow.DistributedOptimizer` takes them.
        custom_objects: as `tf.keras.models.load_model` takes them.

    A dynamic loss scale begins anew from its initial value, as it does when Keras alone loads a model.

    Raises:
        ValueError: the file has no optimizer, or a legacy one, or is an .h5 with a loss scale, in which Keras does not find the
            optimizer's state again; or the combination is not supported.
    """
    known = {kind.__name__: kind for kind in tf.keras.optimizers.Optimizer.__subclasses__()}  # Horovod's go by these names
    model = tf.keras.models.load_model(path, custom_objects={**known, **(custom_objects or {})})
    saved = inner_of(model.optimizer)
    if not isinstance(saved, tf.keras.optimizers.Optimizer) or isinstance(saved, tf.keras.optimizers.legacy.Optimizer):
        raise ValueError(
            f"{path} has {type(saved).__name__} for an optimizer, none of Keras's new ones: load it and compile anew"
        )
    if is_loss_scaled(model.optimizer) and Path(path).suffix == ".h5":
        raise ValueError(f"{path} has a loss scale, whose optimizer loses its state in an .h5: save the model as .keras")
    made = DistributedOptimizer(saved, compression, **options)
    made.build(model.trainable_variables)
    for variable, value in zip(made.variables, saved.variables):
        variable.assign(value)
    if is_loss_scaled(model.optimizer):
        scaled = model.optimizer
        scale = {"initial_scale": float(scaled.loss_scale), "dynamic_growth_steps": scaled.dynamic_growth_steps}
        made = tf.keras.mixed_precision.LossScaleOptimizer(made, scaled.dynamic, **scale)
    model.optimizer = made
    return model


def _must_have_averaged(optimizer: Any) -> bool:
    """Whether an epoch must have had an averaging step: not of one rank alone, nor of fewer batches than go into a step."""
    inner = inner_of(optimizer)
    process_set = inner._allreduce_grads.told.process_set
    return bool(process_set.included() and process_set.size() > 1 and inner._agg_helper is None)


def _compressor_of(model: Any, given: Compressor | None) -> Compressor:
    compressor = given or bound_to(model.optimizer)
    if compressor is None:
        raise ValueError(
            "the model's optimizer has no compressor bound to it: give hvd.DistributedOptimizer a compression= of "
            "hvdcompress.tensorflow, and put CompressionCallback() before the other callbacks of hvdcompress"
        )
    return compressor
