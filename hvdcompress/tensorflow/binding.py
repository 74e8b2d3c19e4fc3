"""Binds a compressor to an optimizer or a tape of Horovod's: it takes the place of the function that averages their gradients.

No module is patched: what is replaced is an attribute of the one object. The function that was there is asked what Horovod
was told: the operation, the process set, and so on.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from ..adapter import second_momentum
from ..errors import CompressionError
from .compressor import Compressor, called_by, refuse_graph
from .reduction import Treatment, inner_of, is_loss_scaled, not_converted


class Told(NamedTuple):
    """What Horovod was told when it made an optimizer or a tape."""

    compression: Any
    op: Any
    sparse_as_dense: bool
    process_set: Any


class Bound:
    """Averages gradients in the place of Horovod's function.

    Args:
        compressor: how.
        told: what Horovod was told.
        optimizer: the one that applies the gradients, as the user has it: perhaps a LossScaleOptimizer; None if unknown.
    """

    def __init__(self, compressor: Compressor, told: Told, optimizer: Any):
        self.compressor, self.told, self.optimizer = compressor, told, optimizer

    @not_converted
    def __call__(self, grads: Sequence[Any], vars: Sequence[tf.Variable], use_generic_names: bool = False) -> list[Any]:
        """Horovod's arguments: gradients, None among them, and the variables that they are of."""
        told, process_set = self.told, self.told.process_set
        if not process_set.included() or process_set.size() == 1:
            return list(grads)
        dense, sparse = [], []
        for place, (gradient, variable) in enumerate(zip(grads, vars)):
            if isinstance(gradient, tf.IndexedSlices) and not told.sparse_as_dense:
                sparse.append((place, gradient))
            elif gradient is not None:
                if not isinstance(variable, tf.Variable):
                    raise ValueError("compression keeps a memory of each variable: take gradients by variables, not by tensors")
                dense.append((place, tf.convert_to_tensor(gradient), variable))
        averaged: list[Any] = list(grads)
        if not dense:
            for place, slices in sparse:
                averaged[place] = hvd.allreduce(slices, op=told.op, process_set=process_set)
            return averaged
        if not tf.executing_eagerly():
            refuse_graph(tf.compat.v1.get_default_graph())
        places, gradients, variables = zip(*dense)
        reduction = self.compressor.reduction(variables, gradients, process_set)
        factor = float(process_set.size()) if told.op == hvd.Sum else 1.0
        # model.compile may have put a LossScaleOptimizer around what was bound.
        treatment = Treatment(factor, called_by(is_loss_scaled) or self.optimizer)
        result = reduction(gradients, treatment, [slices for _, slices in sparse])
        for place, mean in zip([*places, *(place for place, _ in sparse)], [*result.gradients, *result.sparse]):
            averaged[place] = mean
        return averaged


def attach(target: Any, compression: Any = None, *, optimizer: Any = None) -> Any:
    """Binds a compressor to what `hvd.DistributedOptimizer` or `hvd.DistributedGradientTape` has made.

    Args:
        target: the optimizer, or the LossScaleOptimizer around it, before its first step; or the tape.
        compression: the compressor; by default the one that is bound already, or that Horovod was given. Of its own `none`
            and `fp16` Horovod takes care itself: nothing is done.
        optimizer: for a tape, the optimizer that applies its gradients. If it is a LossScaleOptimizer the gradients are taken
            to be of a loss that it has scaled, and are returned so; a method with `rescale` asks it for the learning rate.

    Returns:
        `target`.

    Raises:
        ValueError: the target or the combination is not supported; the message says what to do.
    """
    of_tape = isinstance(target, tf.GradientTape)
    if not of_tape:
        optimizer = target
    inner = inner_of(target)
    reduce = getattr(inner, "_allreduce_grads", None)
    if reduce is None:
        raise ValueError(
            f"{type(target).__name__} is not of Horovod: wrap it in hvd.DistributedOptimizer or DistributedGradientTape"
        )
    told = reduce.told if isinstance(reduce, Bound) else _told(reduce)
    known = reduce.compressor if isinstance(reduce, Bound) else told.compression
    compressor = known if compression is None else compression
    _check_compression(compressor)
    if not isinstance(compressor, Compressor):
        if isinstance(reduce, Bound):
            raise ValueError("a compressor is bound to this already: make it anew for one of Horovod's own")
        return target
    _check_horovods(inner, told.op)
    error = second_momentum(compressor.method, _momentum(optimizer))
    if error is not None:
        raise error
    bound = Bound(compressor, told, optimizer)
    inner._allreduce_grads = bound
    helper = getattr(inner, "_agg_helper", None)  # with backward_passes_per_step
    for name in ("allreduce_grads", "_allreduce_grads"):
        if hasattr(helper, name):
            setattr(helper, name, bound)
    return target


def bound_to(target: Any) -> Compressor | None:
    """The compressor that an optimizer or a tape is bound to."""
    reduce = getattr(inner_of(target), "_allreduce_grads", None)
    return reduce.compressor if isinstance(reduce, Bound) else None


def DistributedOptimizer(optimizer: Any, compression: Any = hvd.Compression.none, **options: Any) -> Any:
    """Horovod's `DistributedOptimizer` around a Keras optimizer, new or legacy, with a compressor bound to it.

    Args:
        optimizer: of Keras. Mixed precision's LossScaleOptimizer goes around the result; `model.compile` does that.
        compression: of `hvdcompress.tensorflow.Compression`, or Horovod's own.
        options: as `horovod.tensorflow.keras.DistributedOptimizer` takes them; `op` and `groups` are honoured.

    Raises:
        ValueError: the combination is not supported.
    """
    if is_loss_scaled(optimizer):
        raise ValueError(
            "wrap the optimizer first, and then the result in LossScaleOptimizer: "
            "LossScaleOptimizer(DistributedOptimizer(optimizer)); model.compile does the latter by itself"
        )
    _check_horovods(optimizer, options.get("op", hvd.Average))
    _check_compression(compression)
    import horovod.tensorflow.keras as keras  # imports Keras, for those who use it

    return attach(keras.DistributedOptimizer(optimizer, compression=compression, **options))


def DistributedGradientTape(
    tape: tf.GradientTape, compression: Any = hvd.Compression.none, *, optimizer: Any = None, **options: Any
) -> Any:
    """Horovod's `DistributedGradientTape`, with a compressor bound to it. One compressor serves all the tapes of a training.

    Args:
        tape: as Horovod takes it.
        compression: of `hvdcompress.tensorflow.Compression`, or Horovod's own.
        optimizer: as `attach` has it.
        options: as Horovod takes them.

    Raises:
        ValueError: the combination is not supported.
    """
    _check_compression(compression)
    if not isinstance(compression, Compressor):
        return hvd.DistributedGradientTape(tape, compression=compression, **options)
    return attach(hvd.DistributedGradientTape(tape, **options), compression, optimizer=optimizer)


def _check_compression(compression: Any) -> None:
    its_class = isinstance(compression, type) and issubclass(compression, Compressor)
    if its_class or not callable(getattr(compression, "compress", None)):
        raise ValueError(
            f"{compression!r} is no compression: give what hvc.Compression.dore() makes, or Compression.none or fp16 as they are"
        )


def _check_horovods(target: Any, op: Any) -> None:
    """Raises ValueError where Horovod would do what compression does not support."""
    if isinstance(target, tf.compat.v1.train.Optimizer):
        raise ValueError("an optimizer of TensorFlow 1 is not supported: use one of Keras, or a tape")
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError("compression averages or sums: use op=hvd.Average or hvd.Sum, not Adasum, Min, Max or Product")


@lru_cache(maxsize=256)  # a loop of one's own has a new tape in every step, and Horovod the same function for all
def _told(reduce: Any) -> Told:
    """What Horovod's function has enclosed."""
    enclosed = inspect.getclosurevars(getattr(reduce, "python_function", reduce)).nonlocals
    missing = [name for name in Told._fields if name not in enclosed]
    if missing:
        raise CompressionError(f"this Horovod's way of averaging is not known (it has no {missing[0]}): use Horovod 0.28")
    return Told(*(enclosed[name] for name in Told._fields))


def _momentum(optimizer: Any) -> float:
    """The momentum, or beta_1, of a Keras optimizer."""
    inner = inner_of(optimizer)
    momentum = getattr(inner, "momentum", None)
    found = momentum if momentum is not None else getattr(inner, "beta_1", 0.0)
    if isinstance(inner, tf.keras.optimizers.legacy.Optimizer):
        config = inner.get_config()  # the attributes are symbolic
        found = config.get("momentum", config.get("beta_1", 0.0))
    return float(found or 0.0)
