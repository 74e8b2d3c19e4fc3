"""The gradients of one set of variables: what their buckets are, and how a step of them is built into a graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from .. import adapter, traffic
from ..adapter import Cut, Tensor
from ..core import Group, Reducer
from ..drivers.tensorflow import Program, Transport
from ..session import STATUS_BYTES, Session

F = TypeVar("F", bound=Callable[..., Any])


def not_converted(function: F) -> F:
    """Keeps AutoGraph from making a text of its own of a function, and of those that it calls."""
    converted: F = tf.autograph.experimental.do_not_convert(function)
    return converted


class Variable(NamedTuple):
    """What must be known of a variable: its name, unique in the set; its shape, and its gradient's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType


class Treatment(NamedTuple):
    """What is done to the gradients beside averaging.

    Attributes:
        factor: what Horovod multiplies the mean by: 1 for Average, the number of ranks for Sum.
        optimizer: the one that will apply them: a LossScaleOptimizer's scale is divided out before the gradients are
            encoded, and multiplied in again; the learning rate goes to a method that asks for it.
    """

    factor: float = 1.0
    optimizer: Any = None


class Averaged(NamedTuple):
    """What a step comes to: NaN where it was given up.

    Attributes:
        gradients, sparse: in the order in which they were given.
        fine: float32[]: 1, or NaN.
    """

    gradients: list[tf.Tensor]
    sparse: list[tf.IndexedSlices]
    fine: tf.Tensor


class Reduction:
    """One rank's part in the averaging of a set of variables' gradients.

    Args:
        variables: in the order in which their gradients are given.
        method, cut, seed: as the compressor has them.
        process_set: who takes part.
        prefix: of the names of Horovod's operations.
    """

    def __init__(self, variables: Sequence[Variable], method: Reducer, cut: Cut, seed: int, process_set: Any, prefix: str):
        self.variables = list(variables)
        # The last layers' gradients are there first.
        order = list(reversed(range(len(variables))))
        where, layouts = cut.buckets(Tensor(variables[i].name, variables[i].shape) for i in order)
        self._buckets = [[i for i, bucket in zip(order, where) if bucket == number] for number in range(len(layouts))]
        self._beside = [i for i, bucket in zip(order, where) if bucket is None]
        for variable in self.variables:
            if not variable.dtype.is_floating:
                raise ValueError(f"variable {variable.name!r} is of {variable.dtype.name}, which compression does not support")
        facts = {f"tensor {variables[i].name}": self._fact(i, bucket) for i, bucket in zip(order, where)}
        group = Group(process_set.rank(), process_set.size(), seed)
        self.session = Session(method, layouts, group, facts)
        self.transport = Transport(prefix, process_set)
        self.resumed = False  # the memory began with one that was saved
        self.program = Program(
            self.session,
            self.transport,
            adapter.warn_of_waiting,
            partial(adapter.warn_of_abandoned, self.session),
            adapter.patience(),
        )
        self._functions: dict[Treatment, Callable[..., Any]] = {}
        adapter.warn_of_nothing_saved(self.session)

    def __call__(self, gradients: Sequence[tf.Tensor], treatment: Treatment, sparse: Sequence[tf.IndexedSlices] = ()) -> Averaged:
        """One step. In a graph, it builds what makes it.

        Args:
            gradients: in the order of the variables.
            treatment: what is done to them beside averaging.
            sparse: other gradients of the step, which Horovod averages as they are.

        Raises:
            CompressionError: a rank failed, or the ranks do not agree. When a graph around this one is run, TensorFlow
                makes an error of its own of it, with the text.
        """
        if not tf.executing_eagerly():
            return self.build(gradients, treatment, sparse)
        if not (is_loss_scaled(treatment.optimizer) or self._rescales):  # then any optimizer has the same function
            treatment = treatment._replace(optimizer=None)
        if treatment not in self._functions:
            build = not_converted(lambda dense, slices: self.build(dense, treatment, slices))
            self._functions[treatment] = tf.function(build, reduce_retracing=True)  # the number of slices differs
        try:
            return Averaged(*self._functions[treatment](list(gradients), list(sparse)))
        except tf.errors.OpError as error:
            raise self.program.failure or error from None

    def build(self, gradients: Sequence[tf.Tensor], treatment: Treatment, sparse: Sequence[tf.IndexedSlices] = ()) -> Averaged:
        """The same, into the graph that is the default."""
        scale = _loss_scale(treatment.optimizer)
        lr = _learning_rate(treatment.optimizer) if self._rescales else None
        wide = [self._widened(gradient, i, scale) for i, gradient in enumerate(gradients)]
        vectors = [[i for i in self._beside if wide[i].dtype == dtype] for dtype in (tf.float32, tf.float64)]
        vectors = [members for members in vectors if members]
        means = self.program.build(
            [[wide[i] for i in bucket] for bucket in self._buckets],
            [tf.concat([tf.reshape(wide[i], [-1]) for i in members], 0) for members in vectors],
            sparse,
            self._sent_beside(),
            lr,
            scale,
        )
        back: dict[int, tf.Tensor] = {}
        for members, vector in zip(vectors, means.dense):
            back.update(zip(members, tf.split(vector, [_elements(self.variables[i]) for i in members])))
        for bucket, tensors in zip(self._buckets, means.gradients):
            back.update(zip(bucket, tensors))
        return Averaged(
            [self._narrowed(back[i], i, treatment.factor, scale) for i in range(len(gradients))],
            [_multiplied(slices, treatment.factor) for slices in means.sparse],
            means.fine,
        )

    def predicted_bytes(self) -> float:
        """As `Compressor` has it."""
        sent = self._sent_beside()
        return self.session.predicted_bytes() + sent.wire + (self.session.group.size - 1) * STATUS_BYTES

    @property
    def _rescales(self) -> bool:
        """Whether the method asks for the learning rate."""
        return bool(getattr(self.session.reducer, "rescale", False))

    def _widened(self, gradient: tf.Tensor, number: int, scale: tf.Tensor | None) -> tf.Tensor:
        """A gradient in its true unit, float32; float64 if it is, and in no bucket."""
        keep = gradient.dtype == tf.float64 and number in self._beside
        shape = self.variables[number].shape
        gradient = gradient if gradient.shape == shape else tf.ensure_shape(gradient, shape)
        gradient = gradient if keep else tf.cast(gradient, tf.float32)
        return gradient if scale is None else gradient / tf.cast(scale, gradient.dtype)

    def _narrowed(self, mean: tf.Tensor, number: int, factor: float, scale: tf.Tensor | None) -> tf.Tensor:
        """A mean in the unit, shape and dtype of the gradient."""
        if factor != 1:
            mean = mean * tf.cast(factor, mean.dtype)
        if scale is not None:
            mean = mean * tf.cast(scale, mean.dtype)
        shape = self.variables[number].shape
        return tf.cast(mean if mean.shape == shape else tf.reshape(mean, shape), self.variables[number].dtype)

    def _sent_beside(self) -> traffic.Traffic:
        """What a step sends outside of the session, and what it would send without compression."""
        group, sizes = self.session.group, [_elements(v) * v.dtype.size for v in self.variables]
        beside = sum(_elements(self.variables[i]) * (8 if self.variables[i].dtype == tf.float64 else 4) for i in self._beside)
        sent = traffic.dense(sum(sizes), group.size) + traffic.allreduced(beside, group.size)
        return sent + traffic.Traffic(paper=2 * beside)

    def _fact(self, number: int, bucket: int | None) -> str:
        variable = self.variables[number]
        return f"{variable.dtype.name}{list(variable.shape)}, " + ("dense" if bucket is None else f"in bucket {bucket}")


def of_variables(variables: Sequence[tf.Variable], gradients: Sequence[tf.Tensor]) -> list[Variable]:
    """What must be known of variables; those of one name are told apart by numbers."""
    seen: Counter[str] = Counter()
    made = []
    for variable, gradient in zip(variables, gradients):
        name = variable.name.split(":")[0]
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}#{seen[name]}"
        made.append(Variable(unique, tuple(variable.shape.as_list()), gradient.dtype))
    return made


def _elements(variable: Variable) -> int:
    return math.prod(variable.shape)


def _multiplied(slices: tf.IndexedSlices, factor: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(slices.values * tf.cast(factor, slices.values.dtype), slices.indices, slices.dense_shape)


def _loss_scale(optimizer: Any) -> tf.Tensor | None:
    return optimizer.loss_scale if is_loss_scaled(optimizer) else None


def is_loss_scaled(optimizer: Any) -> bool:
    return isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)


def inner_of(optimizer: Any) -> Any:
    """The optimizer that a LossScaleOptimizer is around; any other as it is."""
    return optimizer.inner_optimizer if is_loss_scaled(optimizer) else optimizer


def _learning_rate(optimizer: Any) -> tf.Tensor:
    if optimizer is None:
        raise ValueError("rescale=True goes by the learning rate: give the tape the optimizer as well, optimizer=...")
    inner = inner_of(optimizer)
    if isinstance(inner, tf.keras.optimizers.legacy.Optimizer):
        return tf.cast(inner._decayed_lr(tf.float32), tf.float32)
    rate = inner._learning_rate  # the public property of a schedule is that of the step before
    return tf.cast(rate(inner.iterations) if callable(rate) else rate, tf.float32)
