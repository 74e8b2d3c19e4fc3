"""Builds the step of a session into a TensorFlow graph: Python calls make and take payloads, Horovod's operations move them.

    start a bucket            a call: gradients -> payload of its first collective
    ... every bucket
    status                    a call -> record -> allgather -> a call: do the ranks agree?
    advance a bucket          a call: reply -> payload of its next collective
    ... every bucket, every stage
    finish                    a call -> the means

A graph is static: what it asks for is what a reducer's `stages` say, with lengths that may differ from step to step. A
step that the ranks do not agree on goes through the same collectives, with nothing in them.

Calls run one after the other, in the order in which they are built, and nothing communicates inside of one. The first
step that is *executed*, of whichever trace, begins with the handshake. Horovod's operations are not stateful, so a graph
optimiser merges those of equal inputs and drops those whose output is not used: here every input comes out of a call, and
every output goes into one.

Horovod remembers what the ranks have agreed on of an allgather or alltoall, and then makes it with a rank that has called
`hvd.join()` too, where it never ends; what it has to agree on it refuses. So none has the shape that it had the last time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .. import frame, traffic, watch
from ..core import AllGather, AllReduce, AllToAll, Collective, Stage
from ..errors import CompressionError
from ..session import Session
from . import blocking

FILLER = np.zeros(1, np.uint8)  # what goes through a collective of a step that was given up

_meetings: dict[int, Iterator[int]] = defaultdict(itertools.count)  # handshakes so far, by process set


class Transport:
    """Horovod's operations over a process set.

    Args:
        prefix: of the operations' names, the same on all ranks and nobody else's; without "/" and ":".
        process_set: who takes part.
    """

    def __init__(self, prefix: str, process_set: Any):
        self.prefix, self._set = prefix, process_set

    def where(self, name: str) -> dict[str, Any]:
        """Name and process set of an operation, as Horovod takes them."""
        return {"name": f"{self.prefix}_{name}", "ignore_name_scope": True, "process_set": self._set}

    def exchange(self, stage: Stage, payload: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """The tensors of a reply, `payload` being those of `_payload`."""
        if stage.kind is AllReduce:
            return [hvd.allreduce(payload[0], op={"sum": hvd.Sum, "max": hvd.Max}[stage.op], **self.where(name))]
        if stage.kind is AllToAll:
            return list(hvd.alltoall(payload[0], splits=payload[1], **self.where(name)))
        return [self.gather(payload[0], name)]

    def gather(self, payload: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.allgather(payload, **self.where(name))

    def average(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.allreduce(tensor, op=hvd.Average, **self.where(name))

    def average_slices(self, slices: tf.IndexedSlices, name: str, turn: tf.Tensor) -> tf.IndexedSlices:
        """All ranks' slices, divided by their number; they go out in a shape by `turn`, int32[]."""

        def gathered(part: tf.Tensor, number: int) -> tf.Tensor:
            shape = tf.shape(part)
            turned = tf.reshape(part, tf.concat([shape, tf.ones([turn], tf.int32)], 0))
            received = self.gather(turned, f"{name}_{number}")
            return _shaped(tf.reshape(received, tf.concat([[-1], shape[1:]], 0)), [None, *part.shape[1:]])

        values, indices = gathered(slices.values, 0), gathered(slices.indices, 1)
        return tf.IndexedSlices(values / tf.cast(self._set.size(), values.dtype), indices, slices.dense_shape)

    def meeting(self) -> int:
        """The number of the handshake that comes next; ranks may begin with different sets, but begin equally many."""
        return next(_meetings[self._set.process_set_id])

    def meet(self, greeting: tf.Tensor) -> tf.Tensor:
        """Gathers handshakes: under one name, so that ranks meet there whatever they begin with, and hear if it differs."""
        name = f"hvdcompress_{self._set.process_set_id}_handshake"
        return hvd.allgather(greeting, name=name, ignore_name_scope=True, process_set=self._set)


class Means(NamedTuple):
    """What a step comes to, in the form of what it was given; all NaN if it was given up.

    Attributes:
        gradients, dense, sparse: the means.
        fine: float32[]: 1, or NaN.
    """

    gradients: list[list[tf.Tensor]]
    dense: list[tf.Tensor]
    sparse: list[tf.IndexedSlices]
    fine: tf.Tensor


class Program:
    """The step of a session, to be built into as many graphs as there are traces.

    Args:
        session: of this rank.
        transport: between the ranks.
        late: called when other ranks let this one wait for their handshakes for `patience` seconds.
        given_up: called when a step without a loss scale has no mean.
    """

    def __init__(
        self, session: Session, transport: Transport, late: Callable[[], None], given_up: Callable[[], None], patience: float
    ):
        self.session, self.transport = session, transport
        self._late, self._given_up, self._patience = late, given_up, patience
        self._scaled = False
        self._flat = [np.zeros(layout.size, np.float32) for layout in session.layouts]
        self.failure: CompressionError | None = None  # of the last step: TensorFlow keeps its text only
        self._timer: threading.Timer | None = None
        self._waits_since = self._decoded_then = 0.0
        self._turn = 0  # 0 or 1 by the step, committed or not: dimensions of one that gathers have beside their own
        self.ended = 0.0  # when the last step did, by time.monotonic

    def build(
        self,
        gradients: Sequence[Sequence[tf.Tensor]],
        dense: Sequence[tf.Tensor],
        sparse: Sequence[tf.IndexedSlices],
        sent: traffic.Traffic,
        lr: tf.Tensor | None,
        scale: tf.Tensor | None,
    ) -> Means:
        """Builds a step into the graph that is the default.

        Args:
            gradients: float32, those of each bucket in the order of its layout.
            dense, sparse: other tensors of the step, which Horovod averages as they are.
            sent: the bytes of these, and what is saved.
            lr: the learning rate, float32[], if the method asks for it.
            scale: of the loss, float32[], if there is one: only that the ranks agree on it.
        """
        session, transport = self.session, self.transport
        calls, layouts = _Calls(), session.layouts
        rates = [] if lr is None else [lr]
        first, turn = calls(self._meets, [], [tf.bool, tf.int32])
        met = tf.cond(first, self._build_handshake, lambda: tf.constant(0, tf.int8))
        calls.after(met)
        with tf.control_dependencies([met]):  # ranks that do not agree may not even have the same collectives
            averaged_dense = [transport.average(tensor, f"dense_{number}") for number, tensor in enumerate(dense)]
            averaged_sparse = [transport.average_slices(one, f"sparse_{number}", turn) for number, one in enumerate(sparse)]
        stages = [session.reducer.stages(layout, session.group) for layout in layouts]
        pending = []
        for bucket, members in enumerate(gradients):
            start = _bind(self._start, bucket, lr is not None)
            payload = calls(start, [*rates, *members], _types(stages[bucket][0]))
            pending.append(transport.exchange(stages[bucket][0], payload, blocking.name(bucket, 0)))
        finite = [tf.reduce_all(tf.math.is_finite(values)) for values in (*dense, *(slices.values for slices in sparse))]
        scales = [] if scale is None else [scale]
        record = calls(_bind(self._record, sent, len(scales)), [*scales, *finite], [tf.uint8])
        calls(self._agree, [transport.gather(record[0], blocking.STATUS)], [tf.int8])
        for number in range(max(map(len, stages), default=0)):
            for bucket in range(len(layouts)):
                if number < len(stages[bucket]):
                    following = stages[bucket][number + 1] if number + 1 < len(stages[bucket]) else None
                    advance = _bind(self._advance, bucket, number)
                    payload = calls(advance, pending[bucket], _types(following) if following else [tf.int8])
                    if following:
                        pending[bucket] = transport.exchange(following, payload, blocking.name(bucket, number + 1))
        # An error ends the graph: no other rank may then wait for a collective that this one has not come to.
        calls.after(*averaged_dense, *(slices.values for slices in averaged_sparse))
        results = iter(calls(self._finish, [], [tf.float32] * (sum(map(len, gradients)) + 1)))
        fine = _shaped(next(results), [])
        return Means(
            [[_shaped(next(results), g.shape) for g in members] for members in gradients],
            [mean * tf.cast(fine, mean.dtype) for mean in averaged_dense],
            [
                tf.IndexedSlices(slices.values * tf.cast(fine, slices.values.dtype), slices.indices, slices.dense_shape)
                for slices in averaged_sparse
            ],
            fine,
        )

    def _build_handshake(self) -> tf.Tensor:
        calls = _Calls()
        greeting = calls(self._greet, [], [tf.uint8])
        return calls(self._check_handshake, [self.transport.meet(greeting[0])], [tf.int8])[0]

    # The calls.

    def _meets(self) -> Any:
        self.failure = None
        if self.session.begun:  # a step broke off in the middle: an error of Horovod's
            self.session.restart()
        self._turn = 1 - self._turn
        return np.bool_(not self.session.met), np.int32(self._turn)

    def _greet(self) -> Any:
        self._timer = threading.Timer(self._patience, self._late)
        self._timer.daemon = True
        self._timer.start()
        watch.over(self.session)
        return _turned(self.session.handshake({"name of the set of variables": self.transport.prefix}), self.transport.meeting())

    def _check_handshake(self, gathered: Any) -> Any:
        if self._timer is not None:
            self._timer.cancel()
        with self._keeping_failure():
            self.session.check_handshake(frame.split(gathered.reshape(-1), self.session.group.size))
        return np.int8(0)

    def _start(self, bucket: int, has_rate: bool, *arrays: Any) -> Any:
        began, session, flat = time.perf_counter(), self.session, self._flat[bucket]
        lr = float(arrays[0]) if has_rate else None
        try:
            for where, array in zip(session.layouts[bucket].slices.values(), arrays[has_rate:]):
                flat[where] = array.reshape(-1)
        except Exception as error:  # the peers are owed an answer
            session.fail(error)
        session.seconds["encode"] += time.perf_counter() - began
        return _payload(session.start(bucket, flat, lr), self._turn)

    def _record(self, sent: traffic.Traffic, scales: int, *inputs: Any) -> Any:
        for scale in inputs[:scales]:
            self.session.agree_on("loss scale", float(scale))
        self._scaled = bool(scales)
        self.session.check_finite(all(map(bool, inputs[scales:])))
        self.session.count(sent)
        self._waits_since, self._decoded_then = time.perf_counter(), self.session.seconds["decode"]
        return _turned(self.session.record(), self._turn)

    def _agree(self, gathered: Any) -> Any:
        return np.int8(self.session.agree(frame.split(gathered.reshape(-1), self.session.group.size)))

    def _advance(self, bucket: int, number: int, *reply: Any) -> Any:
        session, size = self.session, self.session.group.size
        stages = session.stages(bucket)  # lengths may have changed since tracing
        request = session.advance(bucket, _reply(stages[number], reply, size)) if session.goes_on else None
        if number + 1 == len(stages):
            return np.int8(0)
        return _payload(request, self._turn) if request is not None else _filler(stages[number + 1], size, self._turn)

    def _finish(self) -> Any:
        session = self.session
        decoding = session.seconds["decode"] - self._decoded_then
        session.seconds["wait"] += time.perf_counter() - self._waits_since - decoding
        self.ended = time.monotonic()
        with self._keeping_failure():
            means = session.finish()
        if means is None and not self._scaled:
            self._given_up()
        fine = np.float32("nan") if means is None else np.float32(1)
        pieces = []
        for bucket, layout in enumerate(session.layouts):
            mean = means[bucket] if means is not None else np.full(layout.size, np.nan, np.float32)
            # Copies: TensorFlow shares an array that is aligned, and the method may have kept the mean, to write to it later.
            pieces += [mean[where].reshape(shape).copy() for where, shape in zip(layout.slices.values(), layout.shapes)]
        return [fine, *pieces]

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except CompressionError as error:
            self.failure = error
            raise


class _Calls:
    """Calls of Python functions as operations of a graph, each after the one before."""

    def __init__(self) -> None:
        self._before: list[tf.Tensor] = []

    def __call__(self, function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[Any]) -> list[tf.Tensor]:
        with tf.control_dependencies(self._before):
            made = tf.numpy_function(_without_writing(function), list(inputs), list(dtypes))
        outputs = list(made) if isinstance(made, (list, tuple)) else [made]  # one alone where functions run eagerly
        self._before = outputs[:1]
        return outputs

    def after(self, *tensors: tf.Tensor) -> None:
        """What is called next is called when these are there too."""
        self._before += tensors


def _without_writing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with arguments that cannot be written to: they are memory of TensorFlow's, perhaps a variable's."""

    def call(*arrays: Any) -> Any:
        for array in arrays:
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        return function(*arrays)

    return call


def _bind(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    return lambda *arrays: function(*first, *arrays)


def _shaped(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    """A call's result, whose shape is known; without an operation."""
    tensor.set_shape(shape)
    return tensor


def _types(stage: Stage) -> list[Any]:
    """The dtypes of what `_payload` makes for a stage."""
    if stage.kind is AllReduce:
        return [tf.as_dtype(stage.dtype)]
    return [tf.uint8, tf.int32] if stage.kind is AllToAll else [tf.uint8]


def _turned(payload: Any, turn: int) -> Any:
    """The bytes of a gather as uint8[n] or uint8[n, 1]."""
    return payload.reshape(-1, 1) if turn % 2 else payload


def _payload(request: Collective, turn: int) -> list[Any]:
    """What goes into Horovod's operation: an array, for an alltoall with the number of bytes for each rank."""
    if isinstance(request, AllReduce):
        return [request.array]
    if isinstance(request, AllToAll):
        return [_turned(np.concatenate(request.payloads), turn), np.array([p.size for p in request.payloads], np.int32)]
    return [_turned(request.payload, turn)]


def _filler(stage: Stage, size: int, turn: int) -> list[Any]:
    if stage.kind is AllReduce:
        return [np.zeros(stage.length, stage.dtype)]
    return _payload(AllToAll([FILLER] * size) if stage.kind is AllToAll else AllGather(FILLER), turn)


def _reply(stage: Stage, tensors: Sequence[Any], size: int) -> Any:
    """What a reducer is sent, from what came out of Horovod's operation."""
    if stage.kind is AllReduce:
        return tensors[0]
    if stage.kind is AllToAll:
        received, sizes = tensors
        return np.split(received.reshape(-1), np.cumsum(sizes)[:-1])
    return frame.split(tensors[0].reshape(-1), size)
