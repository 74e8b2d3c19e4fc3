"""The object that Horovod is given as `compression=`: the memory of every set of variables, and the way by a token."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .. import adapter, memory, options
from ..adapter import Cut
from ..core import Reducer
from ..errors import CompressionError
from ..session import Stats, averaged, with_options
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

_instances: dict[str, Iterator[int]] = defaultdict(itertools.count)  # of reductions, by their names but for the number
GENERAL = ("version", "method", "seed", "number of ranks")  # facts that all sets of variables of a training share


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
        self._failure: CompressionError | None = None  # of this rank, to be told to all of them in the next step
        self._retired = Stats()  # of sets whose variables are gone

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
        (mean,), _, fine = reduction.build([tensor], Treatment())
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
            self._retire()
            self._warn_of_another_set(variables)
            made = self._reduction(of_variables(variables, gradients), process_set)
            held = self._held[key] = _Held(made, [weakref.ref(variable) for variable in variables])
        return held.reduction

    # What a user sees

    def __repr__(self) -> str:
        return f"Compressor({with_options(self.method, self._changes)})"

    def stats(self) -> Stats:
        """Bytes, seconds and noise, of the last step and in all; zero where nothing was exchanged.

        Totals, steps too, are summed over all sets of variables; what is said of the last step, and metrics, are of the set
        that made it. Unbound, every tensor takes a part in a step.
        """
        held = [one.reduction for one in self._held.values()]
        latest = self._places or ([max(held, key=lambda reduction: reduction.program.ended)] if held else [])
        unbound = [reduction.session.stats() for reduction in self._places]
        every = [*(reduction.session.stats() for reduction in held), self._retired]
        return Stats(
            sum(stats.steps for stats in every) + max((stats.steps for stats in unbound), default=0),
            sum(stats.abandoned for stats in every) + max((stats.abandoned for stats in unbound), default=0),
            sum((reduction.session.last for reduction in latest), Traffic()),
            sum((stats.total for stats in [*every, *unbound]), Traffic()),
            _summed(stats.seconds for stats in [*every, *unbound]),
            averaged([r.session.metrics for r in latest], [sum(layout.size for layout in r.session.layouts) for r in latest]),
            sum(stats.counted for stats in every) + max((stats.counted for stats in unbound), default=0),
        )

    def predicted_bytes(self) -> float:
        """Bytes that a rank sends in a step of every set of variables as the formulas have it, status and dense tensors included.

        What depends on the data goes by the last step's metrics. `stats().last.wire` is what was counted.
        """
        return sum(reduction.predicted_bytes() for reduction in self.reductions)

    def residual_norm(self) -> float:
        """l2 norm of what this rank keeps of gradients that have not been applied yet."""
        return math.sqrt(sum(reduction.session.residual() for reduction in self.reductions))

    def change(self, **options: Any) -> None:
        """Goes on with other options of the method from the next step; call it between two steps, on every rank alike.

        Nothing is traced anew.

        Raises:
            ValueError: an option is unknown, out of its range, or cannot be changed during training.
        """
        with_options(self.method, {**self._changes, **options})
        for reduction in self.reductions:
            if reduction.session.begun:  # a step has broken off
                reduction.session.restart()
            reduction.session.change(**options)
        self._changes.update(options)

    def reset(self) -> None:
        """Empties the memory, as after weights were replaced; call it between two steps, on every rank alike."""
        for reduction in self.reductions:
            reduction.session.reset()

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are, in the process set."""
        process_set = self._set or hvd.global_process_set
        return process_set.rank(), process_set.size()

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory, as NumPy arrays, numbers and strings. Each rank must keep its own."""
        known = [reduction.session.state_dict() for reduction in self.reductions]
        return {"sets": [*known, *self._to_load]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a memory from `state_dict`. For sets of variables that have made no step yet it is kept until they do.

        Raises:
            CompressionError: it is of another method, model, rank or number of ranks; before the first step, in that step.
        """
        if "sets" not in state:
            raise CompressionError(f"this is no memory of a compressor: it has {sorted(state)}")
        for one in state["sets"]:
            memory.check(one)
        self._to_load = list(state["sets"])
        for reduction in self.reductions:
            self._load(reduction)

    def fail(self, error: CompressionError) -> None:
        """Takes note that this rank cannot go on: every rank will be told in the next step, and raise."""
        self._failure = error
        for reduction in self.reductions:
            self._tell_failure(reduction)

    # Inside

    @property
    def reductions(self) -> list[Reduction]:
        """Those of all sets of variables, in the order in which they came."""
        return [*(held.reduction for held in self._held.values()), *self._places]

    def _reduction(self, variables: Sequence[Variable], process_set: Any) -> Reduction:
        """A new one. Ranks may trace in different orders, so its name is made of what it is for; equal ones are numbered."""
        known = hashlib.sha256(repr([(v.name, v.shape) for v in variables]).encode()).hexdigest()[:12]
        prefix = f"hvdcompress_{process_set.process_set_id}_{known}"
        prefix = f"{prefix}_{next(_instances[prefix])}"
        made = Reduction(variables, self.method, self._cut, self._seed, process_set, prefix)
        try:
            made.session.change(**self._changes)
            self._load(made)
        except CompressionError as error:  # told in the first step, on every rank
            made.session.fail(error)
        self._tell_failure(made)
        return made

    def _tell_failure(self, reduction: Reduction) -> None:
        if self._failure is not None:
            reduction.session.fail(self._failure)
            self._failure = None

    def _load(self, reduction: Reduction) -> None:
        """Takes up what was saved of a set of variables; nothing, if there are only others of the same training."""
        session = reduction.session
        for number, one in enumerate(self._to_load):
            if one["facts"] == session.facts or _contradicts(one["facts"], session.facts):
                session.load_state_dict(one)
                del self._to_load[number]
                reduction.resumed = True
                return

    def _retire(self) -> None:
        """Gives up the sets whose variables are gone, but for what they have sent."""
        gone = [key for key, held in self._held.items() if any(ref() is None for ref in held.variables)]
        for key in gone:
            stats = self._held.pop(key).reduction.session.stats()
            self._retired = Stats(
                self._retired.steps + stats.steps,
                self._retired.abandoned + stats.abandoned,
                total=self._retired.total + stats.total,
                seconds=_summed([self._retired.seconds, stats.seconds]),
                counted=self._retired.counted + stats.counted,
            )

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


def _contradicts(saved: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Whether the facts of two sets of variables cannot be of one training: by the method, say, or the shape of a tensor."""
    kinds = [{key: fact.partition("]")[0] for key, fact in facts.items() if key.startswith("tensor ")} for facts in (saved, own)]
    common = [key for key in kinds[0] if key in kinds[1]]
    return any(saved.get(key) != own.get(key) for key in GENERAL) or any(kinds[0][key] != kinds[1][key] for key in common)


def _summed(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in seconds:
        for part, value in one.items():
            total[part] = total.get(part, 0.0) + value
    return total


def _factor(token: Any, size: int) -> float:
    return float("nan") if np.isnan(token).any() else adapter.factor_of(token.tolist(), size)


def _wide(dtype: tf.DType) -> tf.DType:
    """What a tensor travels as: sums of halves would overflow, and Horovod has no bfloat16."""
    return tf.float64 if dtype == tf.float64 else tf.float32
