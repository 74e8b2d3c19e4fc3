"""One rank's part in a training: its memory, and each step as one transaction.

A `Session` is passive: it makes the collectives of a step and takes their replies; drivers move the bytes. What it
holds together is the agreement. In every step each rank says in a status record how it stands: OK, its gradient is not
finite, or it failed and with which message. All memories move together, on all ranks, or none does:

* all OK: the step is finished and committed;
* a gradient that is not finite anywhere: no result, on every rank, and nothing is committed;
* a failure anywhere: every rank raises the same error, and nothing is committed.

Before the first step a record carries what the ranks must agree on. A failure after the records were exchanged goes out
in place of the payloads that this rank still owes or, if it owes none, with the next record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import __version__, frame, kernels, memory, traffic
from .core import (
    AllGather,
    AllReduce,
    AllToAll,
    Array,
    Bytes,
    Collective,
    Group,
    Layout,
    Outcome,
    Reducer,
    Reduction,
    Stage,
    State,
    Step,
)
from .errors import CompressionError, MismatchError, PayloadError

OK, NONFINITE, ERROR = 0, 1, 2
RECORD = struct.Struct("<BxxxI8s")  # status, step, digest; a text follows
ADDRESS = frame.Address(frame.STATUS, 0, 0, 0)
# What a rank that has failed contributes to an allreduce: reducers see it in the result. A sum of integers has none, and
# so must count its ranks; a maximum need not see NaN.
SPOILT = {("float32", "sum"): np.nan, ("float32", "max"): np.inf, ("int32", "sum"): 0}
MOST = (1 << 31) - 1  # Horovod and MPI count in 32 bits: the elements of an allreduce, and the bytes of what is gathered
STATUS_BYTES = frame.HEADER.size + RECORD.size  # of a record without text


class Record(NamedTuple):
    """How a rank stands in a step."""

    status: int
    step: int
    digest: bytes  # 8 bytes, of what the ranks must agree on
    text: str  # of the handshake or of the failure; else empty

    def pack(self) -> Bytes:
        payload = RECORD.pack(self.status, self.step & 0xFFFFFFFF, self.digest) + self.text.encode()
        return frame.pack(ADDRESS, np.frombuffer(payload, np.uint8))

    @classmethod
    def unpack(cls, buffer: Bytes, sender: int) -> Record:
        payload = frame.unpack(buffer, ADDRESS, sender).tobytes()
        if len(payload) < RECORD.size:
            raise PayloadError(f"the status record from rank {sender} has {len(payload)} bytes, less than {RECORD.size}")
        status, step, digest = RECORD.unpack(payload[: RECORD.size])
        if status not in (OK, NONFINITE, ERROR):
            raise PayloadError(f"the status record from rank {sender} has the status {status}, which is none")
        return cls(status, step, digest, payload[RECORD.size :].decode(errors="replace"))


class Stats(NamedTuple):
    """What a rank's session has done so far.

    Attributes:
        steps, abandoned: steps that were committed, and steps that left no trace since a gradient was not finite or a
            rank failed.
        last, total: bytes of the last step, and of all.
        seconds: spent in all to encode, to wait for collectives, to decode.
        counted: steps, committed or not, that `total` and `seconds` are of: those of this process, where `steps` goes on from
            a memory that was loaded.
        metrics: figures of the last committed step by their names in the method, averaged over the buckets by size;
            the noise of each code relative to ||gradient||^2 and the shares that were sent.
    """

    steps: int = 0
    abandoned: int = 0
    last: traffic.Traffic = traffic.Traffic()
    total: traffic.Traffic = traffic.Traffic()
    seconds: Mapping[str, float] = {}
    metrics: Mapping[str, float] = {}
    counted: int = 0


class Session:
    """One rank's memory of all buckets, and the step that is going on.

    In a step, a driver calls `start` for every bucket, exchanges `record`, calls `agree`, then `advance` with each reply
    as long as the step goes on, and `finish`.

    Args:
        reducer: the method.
        layouts: of the buckets; equal on all ranks.
        group: who takes part.
        facts: what else the ranks must agree on, by name, as text.
    """

    def __init__(self, reducer: Reducer, layouts: Sequence[Layout], group: Group, facts: Mapping[str, str] | None = None):
        self.reducer, self.layouts, self.group = reducer, list(layouts), group
        _check_stages(reducer, self.layouts, group)
        self.states: list[State] = [reducer.init(layout, group) for layout in self.layouts]
        self.facts = {**_facts(reducer, self.layouts, group), **(facts or {})}
        self._facts_digest = hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()
        self._options = repr(reducer)  # by now
        self.met = False  # the ranks have exchanged their handshakes, and agree
        self.run = ""  # names this start of a training, once the ranks have met; it goes with what is saved
        self._proposed = secrets.token_hex(8)
        self._taken_up = ""  # the run of the memory that was loaded
        self.contact: Mapping[str, Any] = {}  # how peers may ask this rank where it is
        self.contacts: list[Mapping[str, Any]] = []  # of all ranks, once they have met
        self.blocked: Callable[[], bool] = lambda: True  # whether this process does nothing but wait, as far as a driver knows
        self._moved = time.monotonic()  # when anything happened last
        self.committed = 0  # steps, and the number of the step that is going on
        self.abandoned = 0  # steps
        self.counted = 0  # steps, committed or not, since this process began
        self.nonfinite: list[int] = []  # ranks whose gradient was not finite in the last step
        self.last, self.total = traffic.Traffic(), traffic.Traffic()
        self.metrics: dict[str, float] = {}
        self._bucket_metrics: list[Mapping[str, float]] = []
        self.seconds = dict.fromkeys(("encode", "wait", "decode"), 0.0)
        self._unreported: BaseException | None = None
        self._restarts, self._resets = 0, 0
        self._begin()

    def _begin(self) -> None:
        self._finite = True
        self._failure: BaseException | None = self._unreported
        self._verdict: bool | CompressionError | None = None  # None until the records are read
        self._runs: dict[int, _Run] = {}
        self._sent = traffic.Traffic()
        self._figures: dict[str, float] = {}
        self._own_part_done = False

    def predicted_bytes(self) -> float:
        """Bytes that a rank sends for the buckets in a step, as the method has it; by the last step's metrics, once there are."""
        metrics = self._bucket_metrics or [{}] * len(self.layouts)
        return sum(self.reducer.wire_bytes(layout, self.group, own) for layout, own in zip(self.layouts, metrics))

    def unsaved(self) -> list[int]:
        """The buckets for which the method is predicted to send no fewer bytes than a dense allreduce; none for one rank."""
        dense = [traffic.dense(4 * layout.size, self.group.size).dense for layout in self.layouts]
        sent = [self.reducer.wire_bytes(layout, self.group) for layout in self.layouts]
        return [bucket for bucket, (s, d) in enumerate(zip(sent, dense)) if s >= d > 0]

    def residual(self) -> float:
        """Squared l2 norm of what this rank keeps of gradients that have not been applied yet."""
        return sum(self.reducer.residual(state) for state in self.states)

    def reset(self) -> None:
        """Empties the memory of all buckets; every rank does it between the same two steps, or the next one raises."""
        self._resets += 1
        self.states = [self.reducer.init(layout, self.group) for layout in self.layouts]
        self.restart()

    def change(self, **options: Any) -> None:
        """Goes on with other options of the method, from the next step; every rank alike, or that step raises.

        Raises:
            ValueError: an option is unknown or out of its range, or the memory of a step before has no place in the method
                that it would make; nothing is changed.
            CompressionError: a step is going on.
        """
        if not options:
            return
        if self.begun:
            raise CompressionError("options can be changed between steps only")
        reducer = with_options(self.reducer, options)
        _check_stages(reducer, self.layouts, self.group)
        for state in self.states:
            new = reducer.init(state.layout, self.group)
            kinds = [
                [(stage.kind, stage.dtype, stage.op) for stage in r.stages(state.layout, self.group)]
                for r in (self.reducer, reducer)
            ]
            if _forms(new) != _forms(state) or kinds[0] != kinds[1]:
                raise ValueError(
                    f"{self.reducer} cannot become {reducer} during training: its memory or its exchanges are others, with "
                    "exchange='auto' perhaps by a new choice; fix exchange= or start anew"
                )
        self.reducer, self._options = reducer, repr(reducer)

    def stats(self) -> Stats:
        return Stats(self.committed, self.abandoned, self.last, self.total, dict(self.seconds), dict(self.metrics), self.counted)

    def state_dict(self) -> dict[str, Any]:
        """The memory of this rank, in the form of `hvdcompress.memory`."""
        return memory.of(self.states, self.committed, self.group, self.facts, self.run or self._taken_up)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a memory from `state_dict`, of the same rank of the same training.

        Raises:
            CompressionError: it is of another method, model, rank or number of ranks, or incomplete; nothing is changed.
        """
        memory.check(state)
        if state["facts"] != self.facts:
            difference = memory.difference(state["facts"], self.facts)
            raise CompressionError(f"the saved memory is of another training; of what was saved and what is here, {difference}")
        if state["rank"] != self.group.rank:
            raise CompressionError(
                f"the saved memory is of rank {state['rank']}, this is rank {self.group.rank}: each rank loads its own"
            )
        self.states = [memory.state_of(state, self.reducer, layout, self.group) for layout in self.layouts]
        self.committed, self._unreported, self._taken_up = state["step"], None, state["run"]
        self._resets += 1
        self._begin()

    def handshake(self, further: Mapping[str, str] | None = None) -> Bytes:
        """The record of before the first step: all that the ranks must agree on, or this rank's failure.

        Args:
            further: what they must agree on in this run, beside what belongs to the memory.
        """
        changed = {} if self._options == self.facts["method"] else {"options by now": self._options}
        taken_up = {"memory taken up": f"of run {self._taken_up}"} if self._taken_up else {}
        agreed = {**self.facts, **changed, **taken_up, **(further or {})}
        return self._record(OK, json.dumps({"agreed": agreed, "contact": self.contact, "run": self._proposed}))

    def check_handshake(self, records: Sequence[Bytes]) -> None:
        """Reads the first record of every rank.

        Raises:
            MismatchError: two ranks differ; the message says in what.
            CompressionError: a rank failed before it could agree.
        """
        self._failure = None
        handshakes = [_handshake(record.text, rank) for rank, record in enumerate(self._read(records, first=True))]
        for rank, other in enumerate(handshakes):
            if list(other.agreed.items()) != list(handshakes[0].agreed.items()):
                difference = memory.difference(handshakes[0].agreed, other.agreed)
                raise MismatchError(f"ranks 0 and {rank} differ in {difference}: give every rank the same")
        self.contacts, self.run = [other.contact for other in handshakes], handshakes[0].run
        self.met = True

    @property
    def estranged(self) -> bool:
        """Whether the ranks are not in the same step: what is under way may never be answered."""
        return isinstance(self._verdict, MismatchError)

    def read_late(self, records: Sequence[Bytes]) -> CompressionError | None:
        """The records of a step that this rank has given up: an error if another rank has taken them for another step's."""
        self.agree(records)
        return self._verdict if isinstance(self._verdict, CompressionError) else None

    def awaited(self) -> list[str]:
        """What of its peers this rank waits for, having done its part of the step; nothing if it has not."""
        if not self._own_part_done:
            return []
        # Asked from another thread: a run may go on meanwhile.
        under_way = [(bucket, run.stage, run.stages) for bucket, run in list(self._runs.items()) if run.request is not None]
        buckets = [
            f"bucket {bucket} in stage {stage + 1} of {len(stages)} ({stages[stage].kind.__name__.lower()})"
            for bucket, stage, stages in under_way
            if stage < len(stages)
        ]
        return buckets if self._verdict is not None else [*buckets, "the status records"]

    def idle(self) -> float:
        """Seconds since anything happened."""
        return time.monotonic() - self._moved

    @property
    def begun(self) -> bool:
        """Whether a step is going on."""
        return bool(self._runs)

    def stages(self, bucket: int) -> Sequence[Stage]:
        """The collectives of a bucket in the step that is going on."""
        return self._runs[bucket].stages

    @property
    def goes_on(self) -> bool:
        """Whether the ranks have agreed on the step that is going on; if not, what they still send is of no account."""
        return self._verdict is True

    def restart(self) -> None:
        """Forgets what was begun of the step: a rank has given up its backward pass, and its gradients come anew.

        Ranks that have not restarted alike find that out by their records.
        """
        self._restarts += 1
        self._begin()

    def fail(self, error: BaseException) -> None:
        """Takes note that this rank cannot go on with the step: every rank will be told, and raise."""
        self._failure = self._failure or error
        if self._own_part_done:  # too late for this step's record
            self._unreported = self._failure

    def check_finite(self, finite: bool) -> None:
        """Takes note of a tensor of the step that is in no bucket."""
        self._finite &= finite

    def count(self, sent: traffic.Traffic) -> None:
        """Counts bytes of the step that are in no bucket."""
        self._sent += sent

    def agree_on(self, name: str, figure: float) -> None:
        """Takes note of a figure of the step that must be the same on all ranks, or the step raises."""
        self._figures[name] = figure

    def start(self, bucket: int, grad: Array, lr: float | None = None) -> Collective:
        """Begins with a bucket: its gradient on this rank is there. Returns its first collective."""
        began = time.perf_counter()
        squares = kernels.sum_of_squares(grad)  # in float64: finite if and only if every element is
        if not math.isfinite(squares):
            self._finite, grad, squares = False, kernels.zeros(grad.size), 0.0
        layout, state = self.layouts[bucket], self.states[bucket]
        reduction = self.reducer.reduce(grad, state, Step(self.committed, squares, lr))
        self._runs[bucket] = _Run(reduction, self.reducer.stages(layout, self.group), lr)
        request = self._resume(bucket, None)
        self.seconds["encode"] += time.perf_counter() - began
        assert request is not None, f"{self.reducer} asked for no collective"
        self._moved = time.monotonic()
        return request

    def record(self) -> Bytes:
        """How this rank stands, when every bucket is started."""
        self._own_part_done, self._moved = True, time.monotonic()
        return self._record(OK if self._finite else NONFINITE)

    def agree(self, records: Sequence[Bytes]) -> bool:
        """Reads every rank's record: does the step go on? If not, replies that are under way must still be awaited."""
        self._moved = time.monotonic()
        try:
            self.nonfinite = [rank for rank, r in enumerate(self._read(records, first=False)) if r.status != OK]
            self._verdict = not self.nonfinite
            if self.nonfinite and not isinstance(self._failure, frame.Excused):
                self._unreported = self._failure  # of a reply that came before the records: no excuse will follow
        except CompressionError as error:
            self._verdict = error
        return self._verdict is True

    def advance(self, bucket: int, reply: Any) -> Collective | None:
        """Takes the reply to a bucket's collective. Returns its next collective, None after the last one."""
        began = time.perf_counter()
        request = self._resume(bucket, reply)
        self.seconds["decode"] += time.perf_counter() - began
        self._moved = time.monotonic()
        return request

    def finish(self, limits: Sequence[float] = ()) -> list[Array] | None:
        """Ends the step, for all buckets or for none.

        Args:
            limits: of each bucket, how large a mean may be in magnitude, where that is less than what float32 holds.

        Returns:
            The mean of each bucket, float32[layout.size]; None if the step was abandoned since a gradient, or a mean,
            was not finite on some rank, or a mean was above its limit.

        Raises:
            CompressionError: a rank failed.
        """
        runs, verdict, failure, self._moved = self._runs, self._verdict, self._failure, time.monotonic()
        self.last, self.total, self.counted = self._sent, self.total + self._sent, self.counted + 1
        self._begin()
        ended = [(run.outcome, run.finite) for _, run in sorted(runs.items()) if run.outcome is not None]
        outcomes = [outcome for outcome, _ in ended]
        if isinstance(verdict, CompressionError) or failure is not None:
            self.abandoned += 1
            if isinstance(verdict, CompressionError):
                raise verdict from failure
            # The same class and text for the rank that failed and for those who are told of it.
            told = str(failure) if isinstance(failure, frame.Excused) else f"rank {self.group.rank}: {_message(failure)}"
            raise CompressionError(told) from failure
        # A mean is the same on every rank, and so is what follows from it.
        fit = all(finite for _, finite in ended) and all(
            np.abs(outcome.mean).max(initial=0) <= limit for outcome, limit in zip(outcomes, limits)
        )
        if not verdict or not fit:
            self.abandoned += 1
            return None
        self.states = [outcome.state for outcome in outcomes]
        self.committed += 1
        self._bucket_metrics = [outcome.metrics for outcome in outcomes]
        self.metrics = averaged(self._bucket_metrics, [layout.size for layout in self.layouts])
        paper = traffic.Traffic(paper=sum(outcome.paper_bytes for outcome in outcomes))
        self.last, self.total = self.last + paper, self.total + paper
        return [outcome.mean for outcome in outcomes]

    def _resume(self, bucket: int, reply: Any) -> Collective | None:
        run = self._runs[bucket]
        if reply is not None:
            self._sent += traffic.exchanged(run.request, reply, self.group.rank, self.group.size)
        run.stage += 1
        request = None
        if self._failure is None:
            try:
                request = run.reduction.send(reply)
                _check_size(request, self.group.size)
            except StopIteration as stop:
                run.outcome = stop.value
                run.finite = kernels.all_finite(stop.value.mean)
            except Exception as error:  # whatever it is, the peers are owed an answer
                self._failure = error
                last = run.stage == len(run.stages)
                self._unreported = error if last and not isinstance(error, frame.Excused) else None
        if self._failure is not None and run.stage < len(run.stages):
            request = self._substitute(bucket, run.stages[run.stage])
        run.request = request
        return request

    def _substitute(self, bucket: int, stage: Stage) -> Collective:
        """A collective that keeps the peers from waiting when this rank has nothing to give, and tells them."""
        if stage.kind is AllReduce:
            self._unreported = self._failure  # floats cannot carry the message
            return AllReduce(np.full(stage.length, SPOILT[stage.dtype, stage.op], stage.dtype), stage.op)
        self._unreported = None
        excuse = frame.excuse(bucket, self.committed, _message(self._failure))
        return AllGather(excuse) if stage.kind is AllGather else AllToAll([excuse] * self.group.size)

    def _record(self, status: int, text: str = "") -> Bytes:
        if self._failure is not None:
            status, text, self._unreported = ERROR, _message(self._failure), None
        rates = {bucket: run.lr for bucket, run in sorted(self._runs.items()) if run.lr is not None}
        counted = [self._restarts, self._resets, self._taken_up]
        agreed = repr([self._facts_digest, self._options, rates, self._figures, *counted])
        return Record(status, self.committed, hashlib.sha256(agreed.encode()).digest()[:8], text).pack()

    def _read(self, buffers: Sequence[Bytes], first: bool) -> list[Record]:
        own = buffers[self.group.rank]
        self._sent += traffic.exchanged(AllGather(own), list(buffers), self.group.rank, self.group.size)
        records = [Record.unpack(buffer, rank) for rank, buffer in enumerate(buffers)]
        failures = [f"rank {rank}: {r.text}" for rank, r in enumerate(records) if r.status == ERROR]
        if failures:
            raise CompressionError("; ".join(failures))
        for rank, record in enumerate(records):
            if bool(record.text) != first:
                where = "before its first step" if record.text else "in the middle of its training"
                raise MismatchError(f"rank {rank} is {where} and rank {self.group.rank} is not: begin anew on every rank")
            if record.step != records[0].step:
                raise MismatchError(
                    f"rank {rank} has finished {record.step} steps and rank 0 {records[0].step}: a rank has lost a step after "
                    "an error, or has not loaded its memory; go on from a checkpoint, on every rank"
                )
            if record.digest != records[0].digest and not first:
                raise MismatchError(
                    f"ranks 0 and {rank} no longer agree: on the options, the tensors, the learning rate, the loss scale, or on "
                    "how often a backward pass was given up, or the memory emptied or loaded"
                )
        return records


def _check_stages(reducer: Reducer, layouts: Sequence[Layout], group: Group) -> None:
    """Raises ValueError, on all ranks alike, if an allreduce would have more elements than can be counted."""
    most = max((stage.length for layout in layouts for stage in reducer.stages(layout, group)), default=0)
    if most > MOST:
        raise ValueError(
            f"{reducer} would sum {most} elements at once, where Horovod and MPI count to {MOST}: use smaller buckets "
            "(bucket_mb), or a method that sends less"
        )


def _check_size(request: Collective, ranks: int) -> None:
    """Raises CompressionError if a payload is too large; those of the other ranks are about as large."""
    if isinstance(request, AllReduce):
        return
    size = sum(p.size for p in request.payloads) if isinstance(request, AllToAll) else request.payload.size * ranks
    if size > MOST:
        raise CompressionError(
            f"{size} bytes would be exchanged at once, where Horovod and MPI count to {MOST}: use smaller buckets (bucket_mb), "
            "or a method that sends less"
        )


def averaged(metrics: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """The means of figures over those that have them, by their sizes."""
    averages: dict[str, float] = {}
    for name in {name: None for one in metrics for name in one}:
        have = [(one[name], max(1, size)) for one, size in zip(metrics, sizes) if name in one]
        averages[name] = sum(value * size for value, size in have) / sum(size for _, size in have)
    return averages


def with_options(reducer: Reducer, options: Mapping[str, Any]) -> Reducer:
    """The same method with other options.

    Raises:
        ValueError: an option is unknown or out of its range.
    """
    known = [field.name for field in dataclasses.fields(reducer)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise ValueError(f"{reducer} has no option {name!r}; it has {', '.join(known) or 'none'}")
    return dataclasses.replace(reducer, **options)  # type: ignore[type-var]


class _Handshake(NamedTuple):
    """What a rank's first record says: what must be agreed on, how it may be asked where it is, a name for the run."""

    agreed: dict[str, str]
    contact: dict[str, Any]
    run: str


def _handshake(text: str, rank: int) -> _Handshake:
    try:
        read = json.loads(text)
        return _Handshake(dict(read["agreed"]), dict(read["contact"]), str(read["run"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PayloadError(
            f"the handshake from rank {rank} does not decode, it begins with {text[:60]!r}: install one version of hvdcompress "
            "everywhere"
        ) from error


def _forms(state: State) -> dict[str, Any]:
    return {name: (array.shape, array.dtype) for name, array in state.arrays.items()}


class _Run:
    """A bucket's reduction in the step that is going on."""

    def __init__(self, reduction: Reduction, stages: Sequence[Stage], lr: float | None):
        self.reduction, self.stages, self.lr = reduction, stages, lr
        self.stage = -1
        self.request: Any = None
        self.outcome: Outcome | None = None
        self.finite = False  # the outcome's mean: it is looked at when it comes, while other buckets are still on their way


def _facts(reducer: Reducer, layouts: Sequence[Layout], group: Group) -> dict[str, str]:
    facts = {
        "version": __version__,
        "method": repr(reducer),
        "seed": str(group.seed),
        memory.RANKS: str(group.size),
        "buckets": str([layout.size for layout in layouts]),
    }
    for layout in layouts:
        for name, shape in zip(layout.names, layout.shapes):
            facts[f"tensor {name}"] = f"{list(shape)} in bucket {layout.bucket}"
    return facts


def _message(error: BaseException | None) -> str:
    return str(error) if isinstance(error, CompressionError) else f"{type(error).__name__}: {error}"
