"""The object that Horovod is given as `compression=`: the memory of every set of variables, and the way by a token."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .. import adapter, options
from ..adapter import Cut
from ..core import Reducer
from ..errors import CompressionError
from ..session import Stats, check_memory, with_options
from ..traffic import Traffic
from .reduction import Reduction, Treatment, Variable, is_loss_scaled, not_converted, of_variables

BIND = (
    "use hvdcompress.tensorflow.DistributedOptimizer or DistributedGradientTape in place of Horovod's, or attach(), or in fit a "
    "hvdcompress.keras.CompressionCallback"
)
NO_XLA = (
    "jit_compile=True is not supported: XLA has neither Horovod's allgather nor Python calls; leave it out of compile() and "
    "tf.function (an optimizer's own jit_compile is no matter)"
)

_instances: dict[int, Iterator[int]] = defaultdict(itertools.count)  # of reductions, by process set


class _Held(NamedTuple):
    reduction: Reduction
    variables: list[weakref.ref[tf.Variable]]


class Compressor:
    """Compresses gradients, as Horovod's `compression=`.

    Bound to an optimizer or a tape (`hvdcompress.tensorflow.attach`), gradients go in buckets, in reverse order of their
    variables. Every set of variables whose gradients come together has a memory of its own: that of a model, or of the
    layers that are not frozen; of two models, two.

    Unbound, Horovod hands over one tensor after the other without saying whose it is. Each is reduced by itself, with a
    memory by its place in the order, and Horovod is given a token in its place: for methods that do not span tensors, one
    compressor to each optimizer or tape. A step is then one transaction for each tensor, not for all.

    Args:
        method: how to average.
        process_set: unbound, the one that the optimizer was given, if any; bound, it is the optimizer's.
        bucket_mb: size of a bucket, in MiB of float32; a method for whole models has one bucket, whatever its size.
        dense_below: tensors of fewer elements, or of one dimension or none, are not compressed; a method for whole models
            has an option of its own for that.
        seed: of the random draws, the same on all ranks.

    Raises:
        ValueError: an option is out of its range.

    While training, on every rank alike:
        CompressionError: a rank failed, the ranks do not agree, or Horovod was told to combine the gradients in a way
            that compression does not support. From a graph it comes as tf.errors.UnknownError, with the text.
    """

    def __init__(
        self, method: Reducer, *, process_set: Any = None, bucket_mb: float = 4.0, dense_below: int = 1000, seed: int = 0
    ):
        options.whole("seed", seed, 0)
        self.method = method
        self._set, self._seed = process_set, seed
        self._cut = Cut(method.whole_model, bucket_mb, dense_below)
        self._changes: dict[str, Any] = {}  # of the method's options
        self._held: dict[tuple[int, ...], _Held] = {}  # by the ids of the variables
        self._places: list[Reduction] = []  # unbound, by the place of a tensor in a trace
        self._tokens: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()  # next place, by graph
        self._to_load: list[Mapping[str, Any]] = []  # of reductions that are not there yet

    # Horovod's Compressor API

    @not_converted
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Takes a gradient when a graph is built; returns what Horovod is to allreduce in its place, and a context.

        Raises:
            ValueError: this method, or this gradient, cannot be compressed unbound; the message says what to do.
        """
        if tensor.dtype.is_floating and not self._cut.whole_model and self._is_small(tensor):
            return tf.cast(tensor, _wide(tensor.dtype)), tensor.dtype
        process_set = self._set or hvd.global_process_set
        if not process_set.included():  # Horovod builds what it then does not run
            return tensor, tensor.dtype
        self._refuse_unbound(tensor)
        place = next(self._tokens.setdefault(tensor.graph, itertools.count()))
        variable = Variable(f"gradient {place}", tuple(tensor.shape.as_list()), tensor.dtype)
        if place == len(self._places):
            self._places.append(self._reduction([variable], process_set))
        reduction = self._places[place]
        if reduction.variables != [variable]:
            raise ValueError(
                f"gradient {place} was {reduction.variables[0].dtype.name}{list(reduction.variables[0].shape)} and is "
                f"{variable.dtype.name}{list(variable.shape)}: give each optimizer or tape a compressor of its own; or {BIND}"
            )
        (mean,), fine = reduction.build([tensor], Treatment())
        token = tf.constant(adapter.token(process_set.rank()), _wide(tensor.dtype))
        # Tokens of constants would be merged with others by Grappler, and not by the same on all ranks.
        return token * tf.cast(fine, token.dtype), mean

    @not_converted
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Takes what Horovod made of `compress`'s tensor; returns the averaged gradient."""
        if isinstance(ctx, tf.DType):
            return tf.cast(tensor, ctx)
        size = (self._set or hvd.global_process_set).size()
        factor = tf.numpy_function(lambda token: np.float32(_factor(token, size)), [tensor], tf.float32)
        return ctx * tf.cast(tf.ensure_shape(factor, []), ctx.dtype)

    # Bound

    def reduction(self, variables: Sequence[tf.Variable], gradients: Sequence[tf.Tensor], process_set: Any) -> Reduction:
        """That of a set of variables; made when it first comes."""
        key = (process_set.process_set_id, *map(id, variables))
        held = self._held.get(key)
        if held is None or any(ref() is not variable for ref, variable in zip(held.variables, variables)):
            if self._set not in (None, process_set):
                raise ValueError("the compressor was given another process set than the optimizer: give it none")
            self._held = {k: held for k, held in self._held.items() if all(ref() is not None for ref in held.variables)}
            self._warn_of_another_set(variables)
            made = self._reduction(of_variables(variables, gradients), process_set)
            held = self._held[key] = _Held(made, [weakref.ref(variable) for variable in variables])
        return held.reduction

    # What a user sees

    def stats(self) -> Stats:
        """Bytes, seconds and noise, of the last step and in all, over all sets of variables; zero where nothing was exchanged.

        Steps are those of the set that had most.
        """
        every = [reduction.session.stats() for reduction in self._reductions]
        if len(every) == 1:
            return every[0]
        return Stats(
            max((stats.steps for stats in every), default=0),
            max((stats.abandoned for stats in every), default=0),
            sum((stats.last for stats in every), Traffic()),
            sum((stats.total for stats in every), Traffic()),
            {part: sum(stats.seconds[part] for stats in every) for part in (every[0].seconds if every else ())},
            {},
        )

    def predicted_bytes(self) -> float:
        """Bytes that a rank sends in a step of all sets of variables as the formulas have it, status and dense tensors included.

        What depends on the data goes by the last step's metrics. `stats().last.wire` is what was counted.
        """
        return sum(reduction.predicted_bytes() for reduction in self._reductions)

    def residual_norm(self) -> float:
        """l2 norm of what this rank keeps of gradients that have not been applied yet."""
        return math.sqrt(sum(reduction.session.residual() for reduction in self._reductions))

    def change(self, **options: Any) -> None:
        """Goes on with other options of the method from the next step; call it between two steps, on every rank alike.

        Nothing is traced anew.

        Raises:
            ValueError: an option is unknown, out of its range, or cannot be changed during training.
        """
        with_options(self.method, {**self._changes, **options})
        for reduction in self._reductions:
            reduction.session.change(**options)
        self._changes.update(options)

    def reset(self) -> None:
        """Empties the memory, as after weights were replaced; call it between two steps, on every rank alike."""
        for reduction in self._reductions:
            reduction.session.reset()

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory, as NumPy arrays, numbers and strings. Each rank must keep its own."""
        known = [reduction.session.state_dict() for reduction in self._reductions]
        return {"sets": [*known, *self._to_load]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a memory from `state_dict`. For sets of variables that have made no step yet it is kept until they do.

        Raises:
            CompressionError: it is of another method, model, rank or number of ranks; before the first step, in that step.
        """
        if "sets" not in state:
            raise CompressionError(f"this is no memory of a compressor: it has {sorted(state)}")
        for one in state["sets"]:
            check_memory(one)
        reductions = self._reductions
        for reduction, one in zip(reductions, state["sets"]):
            reduction.session.load_state_dict(one)
        self._to_load = list(state["sets"][len(reductions) :])

    # Inside

    @property
    def _reductions(self) -> list[Reduction]:
        return [*(held.reduction for held in self._held.values()), *self._places]

    def _reduction(self, variables: Sequence[Variable], process_set: Any) -> Reduction:
        """Reductions are numbered in the order in which they are made, which is the same on all ranks."""
        set_id = process_set.process_set_id
        prefix = f"hvdcompress_{set_id}_{next(_instances[set_id])}"
        made = Reduction(variables, self.method, self._cut, self._seed, process_set, prefix)
        try:
            made.session.change(**self._changes)
            if self._to_load:
                made.session.load_state_dict(self._to_load.pop(0))
        except CompressionError as error:  # told in the first step, on every rank
            made.session.fail(error)
        return made

    def _warn_of_another_set(self, variables: Sequence[tf.Variable]) -> None:
        known = {id(ref()): ref() for held in self._held.values() for ref in held.variables}
        shared = [variable.name for variable in variables if id(variable) in known]
        if shared:
            warnings.warn(
                f"variables that were trained before ({', '.join(shared[:3])}{' ...' if len(shared) > 3 else ''}) now come with "
                f"others, or fewer: this set of {len(variables)} begins with an empty memory; that of the other is kept",
                RuntimeWarning,
                stacklevel=2,
            )

    def _is_small(self, tensor: tf.Tensor) -> bool:
        return tensor.shape.is_fully_defined() and self._cut.small(tensor.shape.as_list())

    def _refuse_unbound(self, tensor: tf.Tensor) -> None:
        if self._cut.whole_model:
            raise ValueError(f"{self.method} spans all tensors of a model, and Horovod hands over one by one: {BIND}")
        if getattr(self.method, "rescale", False):
            raise ValueError(f"rescale=True goes by the learning rate, which Horovod does not tell: {BIND}")
        if tf.executing_eagerly():
            raise ValueError(f"without a graph nothing tells which gradient this is: {BIND}")
        if not tensor.dtype.is_floating or not tensor.shape.is_fully_defined():
            raise ValueError(f"a gradient of {tensor.dtype.name}{tensor.shape} cannot be compressed by itself: {BIND}")
        if called_by(is_loss_scaled):
            raise ValueError(f"gradients are multiplied by a loss scale that Horovod does not tell: {BIND}")
        refuse_graph(tensor.graph)


def called_by(known: Any) -> Any:
    """The nearest object on the stack, called by its method, that `known` holds of; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and known(caller):
            return caller
        frame = frame.f_back
    return None


def refuse_graph(graph: Any) -> None:
    """Raises ValueError where a step cannot be built: in TensorFlow 1's graphs, and for XLA."""
    if not hasattr(graph, "outer_graph"):
        raise ValueError("compression needs TensorFlow 2's functions, not a graph of TensorFlow 1")
    if called_by(lambda caller: getattr(caller, "_jit_compile", None) is True and hasattr(caller, "python_function")):
        raise ValueError(NO_XLA)


def _factor(token: Any, size: int) -> float:
    return float("nan") if np.isnan(token).any() else adapter.factor_of(token.tolist(), size)


def _wide(dtype: tf.DType) -> tf.DType:
    """What a tensor travels as: sums of halves would overflow, and Horovod has no bfloat16."""
    return tf.float64 if dtype == tf.float64 else tf.float32
