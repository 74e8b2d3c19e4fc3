"""The object that Horovod is given as `compression=`."""

from __future__ import annotations

import itertools
import math
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

from .. import adapter, memory, options, traffic, watch
from ..adapter import Cut
from ..core import AllGather, Array, Group, Reducer
from ..drivers import blocking
from ..drivers.torch import Handle, Transport, blocked
from ..errors import CompressionError
from ..session import STATUS_BYTES, Session, Stats, with_options
from . import regroup
from .binding import Binding, Bound, Parameters, UnboundError
from .flat import Flat

_instances: dict[int, Iterator[int]] = defaultdict(itertools.count)  # of compressors in use, by process set

REFUSED = object()  # the context of a gradient that belongs to no parameter: its step fails on every rank


class _Context(NamedTuple):
    """What `decompress` must know of a gradient."""

    bound: Bound
    dtype: torch.dtype
    device: torch.device


class Compressor:
    """Compresses the gradients of a model's parameters, as Horovod's `compression=`.

    Large gradients are gathered into buckets, in reverse order of the parameters, and averaged by the method under
    names of the compressor's own, as soon as a bucket is full; Horovod is given a token in their place. Small ones go
    through Horovod as they are.

    Args:
        parameters: the model, or pairs of name and parameter as `named_parameters()` gives them.
        method: how to average.
        process_set: the one that the optimizer was given, if any.
        bucket_mb: size of a bucket, in MiB of float32; a method for whole models has one bucket, whatever its size.
        dense_below: tensors of fewer elements, or of one dimension or none, are not compressed; a method for whole models
            has an option of its own for that.
        seed: of the random draws, the same on all ranks.
        unbound: "error" or "dense": what to do with a tensor that is no gradient of `parameters`.
        optimizer: for a method with `rescale`, which goes by the learning rates: the optimizer that is wrapped. No bucket
            then holds parameters of two of its groups.
        scaler: the `torch.amp.GradScaler` by whose scale the loss is multiplied: the memory is then in the gradients' own
            units, and a step that the scaler skips leaves it as it was.

    Raises:
        ValueError: an option is out of its range, or there is nothing to compress.

    While training, on every rank alike:
        CompressionError: a rank failed, the ranks do not agree, or Horovod was told to combine the gradients in a way
            that compression does not support. The message says which, and what to do.
    """

    def __init__(
        self,
        parameters: Parameters,
        method: Reducer,
        *,
        process_set: Any = None,
        bucket_mb: float = 4.0,
        dense_below: int = 1000,
        seed: int = 0,
        unbound: str = "error",
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ):
        options.choice("unbound", unbound, ("error", "dense"))
        options.whole("seed", seed, 0)
        if getattr(method, "rescale", False) and optimizer is None:
            raise ValueError("rescale=True goes by the learning rates: give the optimizer as well, optimizer=...")
        self.method = method
        self._set = process_set or hvd.global_process_set
        self._seed, self._unbound, self._optimizer, self._scaler = seed, unbound, optimizer, scaler
        self.binding = Binding(parameters, Cut(method.whole_model, bucket_mb, dense_below), optimizer)
        self._flat = Flat(self.binding.layouts)
        self._transport: Transport | None = None
        self._session: Session | None = None
        self._greeting: Handle | None = None
        self._scale = 1.0  # of the loss, in the step that is going on
        self._changes: dict[str, Any] = {}  # of the method's options
        self._to_load: Mapping[str, Any] | None = None
        self._to_tell: CompressionError | None = None  # in the next step, to every rank
        self._order: list[int] = []  # in which the gradients of the last step came
        self._caller: weakref.ref[torch.optim.Optimizer] | None = None  # Horovod's, which began the step
        self._submitted: Any  # Horovod's own record of what its optimizer has submitted; another one after a reset
        self._status: Handle | None
        self._ended: bool
        self._begin_step()

    # Horovod's Compressor API

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Takes a gradient; returns what Horovod is to allreduce in its place, and a context for `decompress`."""
        if self._ended:
            self._begin_step()
        try:
            number = self.binding.find(tensor, self._arrived, self._order)
        except CompressionError as error:
            if self._unbound == "dense" and isinstance(error, UnboundError):
                return tensor, None
            self._connect(error)
            return self._token(), REFUSED
        if self._session is not None and not self._arrived and self.place != (self._session.group.rank, self._session.group.size):
            self.meet_again()  # elastic Horovod has taken ranks away, and gone on
        session = self._connect()
        if self._given_up(number):
            self._check_caller()
            self._restart(session)
        if not self._arrived:
            caller = _calling_optimizer(self)
            self._caller = weakref.ref(caller) if caller is not None else None
            self._submitted = getattr(caller, "_handles", None)
            if self._scaler is not None:
                self._scale = float(self._scaler.get_scale())
                session.agree_on("loss scale", self._scale)
        self._arrived[number] = None
        bound = self.binding.bounds[number]
        handed = self._take(bound, tensor, session)
        if bound.bucket is not None:
            self._missing[bound.bucket] -= 1
            if not self._missing[bound.bucket] and self._greeting is None:
                self._start(bound.bucket, session)
        if len(self._arrived) == len(self.binding.bounds) and self._greeting is None:
            self._status = self._transport_in_use.submit(AllGather(session.record()), blocking.STATUS)
        return handed, _Context(bound, tensor.dtype, tensor.device)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Takes what Horovod made of `compress`'s tensor; returns the averaged gradient, a part of its bucket's mean.

        The first call in a step brings the whole step to its end.
        """
        if ctx is None:
            return tensor
        if self._failure is not None:
            raise CompressionError(f"the step has failed already: {self._failure}")
        factor = adapter.factor_of(tensor[-2:].tolist(), self._set.size())
        if not self._ended:
            self._end_step(factor)
        if ctx is REFUSED:
            raise CompressionError("a gradient of no parameter of the compressor came in a step that had ended")
        bound, dtype, device = ctx
        shape = bound.parameter.shape
        if self._means is None:
            return torch.full(shape, float("nan"), dtype=dtype, device=device)
        if bound.bucket is None:
            return tensor[:-2].to(dtype, copy=True).view(shape)
        mean = torch.from_numpy(self._means[bound.bucket])[self.binding.layouts[bound.bucket].slices[bound.name]]
        if factor * self._scale != 1:
            mean.mul_(factor * self._scale)
        return mean.to(device, dtype).view(shape)

    # What a user sees

    def __repr__(self) -> str:
        return f"Compressor({with_options(self.method, self._changes)})"

    def stats(self) -> Stats:
        """Bytes, seconds and noise, of the last step and in all; all zero where Horovod had nothing to exchange."""
        return self._session.stats() if self._session else Stats()

    def predicted_bytes(self) -> float:
        """Bytes that a rank sends in a step as the formulas have it, tokens, status and dense tensors included.

        What depends on the data goes by the last step's metrics. `stats().last.wire` is what was counted.
        """
        if self._session is None:
            return 0.0
        group, methods_part = self._session.group, self._session.predicted_bytes()
        beside = sum(self._handed_bytes(bound) for bound in self.binding.bounds)
        return methods_part + traffic.allreduced(beside, group.size).wire + (group.size - 1) * STATUS_BYTES

    def residual_norm(self) -> float:
        """l2 norm of what this rank keeps of gradients that have not been applied yet."""
        return math.sqrt(self._session.residual()) if self._session else 0.0

    def change(self, **options: Any) -> None:
        """Goes on with other options of the method from the next step; call it between two steps, on every rank alike.

        Raises:
            ValueError: an option is unknown, out of its range, or cannot be changed during training; nothing is changed.
        """
        with_options(self.method, {**self._changes, **options})
        if self._session is not None:
            self._settle()
            self._session.change(**options)
        self._changes.update(options)

    def reset(self) -> None:
        """Empties the memory, as after weights were replaced; call it between two steps, on every rank alike."""
        if self._session is not None:
            self._settle()
            self._session.reset()

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory, as arrays (torch tensors), numbers and strings. Each rank must keep its own."""
        state = self._kept()
        if not state:
            return {}
        return {**state, "arrays": {name: torch.from_numpy(array.copy()) for name, array in state["arrays"].items()}}

    def _kept(self) -> Mapping[str, Any] | None:
        """The memory, or what is to be loaded, in the form of `hvdcompress.memory`."""
        return self._session.state_dict() if self._session else self._to_load

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a memory from `state_dict`. Before the first step it is kept until the ranks have met.

        Raises:
            CompressionError: it is of another method, model, rank or number of ranks; before the first step, in that step.
        """
        if not state:
            return
        memory.check(state)
        arrays = {name: torch.as_tensor(array).cpu().numpy() for name, array in state["arrays"].items()}
        if self._session is None:
            self._to_load = {**state, "arrays": arrays}
        else:
            self._settle()
            self._session.load_state_dict({**state, "arrays": arrays})

    def fail(self, error: CompressionError) -> None:
        """Takes note that this rank cannot go on: every rank will be told in the next step, and raise."""
        self._to_tell = error

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the options, and the memory of this rank; nothing of what is going on, and no scaler."""
        nothing = dict.fromkeys(("_session", "_transport", "_greeting", "_caller", "_submitted", "_scaler", "_status", "_means"))
        return {**self.__dict__, **nothing, "_to_load": self._kept(), "_pending": {}, "_arrived": {}, "_ended": True}

    # A step

    def _begin_step(self) -> None:
        self._arrived: dict[int, None] = {}  # numbers of tensors, in order
        self._missing = [len(layout.names) for layout in self.binding.layouts]
        self._pending: dict[int, Handle] = {}
        self._status = None
        self._submitted = None
        self._means: list[Array] | None = None
        self._failure: str | None = None  # no exception: its traceback would keep the step's graph, and so Horovod's hooks
        self._ended = False

    def _given_up(self, number: int) -> bool:
        """Whether what arrived before is of a backward pass that was given up: it comes anew, or Horovod has forgotten it."""
        if number in self._arrived or not self._arrived or self._submitted is None:
            return number in self._arrived
        optimizer = _calling_optimizer(self)
        return optimizer is not None and optimizer._handles is not self._submitted  # type: ignore[attr-defined]

    def _settle(self) -> None:
        """Before what is for between two steps: raises in the middle of one, and forgets one that Horovod has forgotten."""
        if self._session is None or self._ended or not self._arrived:
            return
        caller = self._caller() if self._caller is not None else None
        if caller is not None and self._submitted and caller._handles is self._submitted:  # type: ignore[attr-defined]
            raise CompressionError("the memory can be changed between two steps only: let the optimizer end this one before")
        self._restart(self._session)

    def _check_caller(self) -> None:
        """Raises if a gradient came twice since the hooks of two optimizers are at work, which Horovod would not tell in time."""
        before = self._caller() if self._caller is not None else None
        if before is not None and before is not _calling_optimizer(self):
            raise CompressionError(
                "two of Horovod's optimizers average the same parameters: one that was wrapped before is still in memory, with "
                "its hooks; wrap once, or `del optimizer; gc.collect()` before it is done anew"
            )

    def _restart(self, session: Session) -> None:
        """Begins the step anew. What was submitted is left behind: a rank that has come less far never answers it."""
        error = session.read_late(self._transport_in_use.wait(self._status)) if self._status is not None else None
        self._transport_in_use.leave_behind(self._pending.values())
        session.restart()
        if error is not None:
            session.fail(error)
        self._begin_step()

    def _connect(self, error: CompressionError | None = None) -> Session:
        """The session; the first call makes it, and meets the other ranks.

        It waits for them, but not for ever: a rank that was given no compressor never comes, and goes on to submit its
        gradients under the names of our tokens. Then so do we, and Horovod says that they do not fit.
        """
        error, self._to_tell = error or self._to_tell, None
        if self._session is None:
            group = Group(*self.place, self._seed)
            session = Session(self.method, self.binding.layouts, group, {"unbound": self._unbound, **self.binding.facts()})
            try:
                session.change(**self._changes)
                if self._to_load is not None:
                    session.load_state_dict(self._to_load)
                session.blocked = blocked
                watch.over(session)
            except (CompressionError, ValueError) as failure:
                error = error or CompressionError(str(failure))
            error = error or self._second_momentum()
            if error is not None:
                session.fail(error)
            transport = self._transport_in_use
            greeting = transport.submit(AllGather(session.handshake()), blocking.STATUS)
            deadline = time.monotonic() + adapter.patience()
            while not transport.done(greeting) and time.monotonic() < deadline:
                time.sleep(0.001)
            if transport.done(greeting):
                session.check_handshake(transport.wait(greeting))
            else:
                adapter.warn_of_waiting()
                self._greeting = greeting
            self._session = session
            adapter.warn_of_nothing_saved(session)
        elif error is not None:
            self._session.fail(error)
        return self._session

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are, in the process set; by now."""
        return self._set.rank(), self._set.size()

    def meet_again(self) -> None:
        """Begins anew among ranks that have changed, with what all that are left have kept; every rank calls it.

        Where the ranks are those that they were, each has its own memory again; else it is redistributed (`hvdcompress.memory`).
        A rank that is new brings none.
        """
        kept, (rank, size) = self.state_dict(), self.place
        self.begin_anew()
        number = next(_instances[self._set.process_set_id])
        brought = regroup.exchange(kept, number, self._changes, self._set)
        self._number(max(one.number for one in brought))
        memories = [one.memory for one in brought if one.memory]
        self._changes = next((one.changes for one in brought if one.memory), self._changes)
        if [(one["rank"], one["facts"][memory.RANKS]) for one in memories] == [(r, str(size)) for r in range(size)]:
            self.load_state_dict(kept)
        elif memories:
            self.load_state_dict(memory.redistributed(memories, self.method, rank, size))

    def committed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What elastic Horovod restores by `begin_anew`: the memory, and the options that were changed."""
        return self.state_dict(), dict(self._changes)

    def begin_anew(self, kept: Mapping[str, Any] | None = None, changes: Mapping[str, Any] | None = None) -> None:
        """As before the first step, with a memory to be loaded then: what was going on is given up."""
        if changes is not None:
            self._changes = dict(changes)
        self._session, self._transport, self._greeting, self._to_load = None, None, None, None
        self._begin_step()
        self.load_state_dict(kept or {})

    @property
    def _transport_in_use(self) -> Transport:
        """Compressors are numbered by their first use, which comes in the same order on all ranks."""
        if self._transport is None:
            self._number(next(_instances[self._set.process_set_id]))
        assert self._transport is not None
        return self._transport

    def _number(self, number: int) -> None:
        set_id = self._set.process_set_id
        _instances[set_id] = itertools.count(number + 1)
        self._transport = Transport(f"hvdcompress.{set_id}.{number}", self._set)

    def _second_momentum(self) -> CompressionError | None:
        """An error if the optimizer that calls has a momentum beside the method's own."""
        optimizer = _calling_optimizer(self)
        for group in optimizer.param_groups if optimizer else ():
            error = adapter.second_momentum(self.method, group.get("momentum") or group.get("betas", (0,))[0])
            if error is not None:
                return error
        return None

    def _take(self, bound: Bound, tensor: torch.Tensor, session: Session) -> torch.Tensor:
        """Puts a gradient into its bucket, or beside a token; returns what Horovod is to allreduce."""
        size = session.group.size
        handed = self._token()
        session.count(traffic.dense(tensor.numel() * tensor.element_size(), size))
        if bound.bucket is None:
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            session.check_finite(bool(torch.isfinite(tensor).all()))
            handed = torch.cat([tensor.detach().reshape(-1).to(wide), handed.to(tensor.device, wide)])
        else:
            self._flat.put(bound.bucket, bound.name, tensor, self._scale)
        session.count(traffic.allreduced(self._handed_bytes(bound), size))
        if bound.bucket is None:
            session.count(traffic.Traffic(paper=2 * tensor.numel() * handed.element_size()))
        return handed

    def _handed_bytes(self, bound: Bound) -> int:
        """What Horovod allreduces for a tensor: the token, beside the tensor itself if that travels dense."""
        elements = 0 if bound.bucket is not None else bound.parameter.numel()
        return (elements + 2) * (8 if bound.bucket is None and bound.parameter.dtype == torch.float64 else 4)

    def _start(self, bucket: int, session: Session) -> None:
        lr = None
        if self._optimizer is not None:
            # The wrapped optimizer is another object than the one that was given, and its groups may have been replaced.
            self._optimizer = _calling_optimizer(self) or self._optimizer
            lr = self.binding.learning_rate(bucket, self._optimizer)
        request = session.start(bucket, self._flat.take(bucket), lr)
        self._pending[bucket] = self._transport_in_use.submit(request, blocking.name(bucket, 0))

    def _end_step(self, factor: float) -> None:
        """Brings the step to its end on this rank; an error is kept for the tensors that have not asked yet."""
        self._order, self._ended = list(self._arrived), True
        try:
            session = self._connect()
            self._means = self._wind_up(session, factor)
            if self._means is None and self._scaler is None:
                adapter.warn_of_abandoned(session)
        except Exception as error:
            self._failure = str(error)
            raise
        finally:
            self._pending, self._status = {}, None

    def _wind_up(self, session: Session, factor: float) -> list[Array] | None:
        transport = self._transport_in_use
        if self._greeting is not None:
            greeting, self._greeting = self._greeting, None
            session.check_handshake(transport.wait(greeting))
        optimizer = _calling_optimizer(self)
        missing = self.binding.missing(self._arrived) or _unhooked(optimizer) or _unscaled(self._scaler, optimizer)
        if missing is not None:
            session.fail(missing)
        for bucket in range(len(self.binding.layouts)):
            if bucket not in self._pending:
                self._start(bucket, session)
        if self._status is None:
            self._status = transport.submit(AllGather(session.record()), blocking.STATUS)
        limits = self.binding.limits(factor * self._scale) if self._scaler is not None else ()
        return blocking.wind_up(session, transport, self._pending, self._status, limits)

    # The token

    def _token(self) -> torch.Tensor:
        """float32[2] that Horovod allreduces: its outcome tells what was done to it, and among whom."""
        return torch.tensor(adapter.token(self._set.rank()))


def _calling_optimizer(compressor: Compressor) -> torch.optim.Optimizer | None:
    """Horovod's optimizer, which is on the stack when it calls `compress` or `decompress`, and is handed over nowhere."""
    frame: FrameType | None = sys._getframe(1)  # not our own: its f_locals would hold itself, and so the caller's tensors
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer) and getattr(caller, "_compression", None) is compressor:
            return caller
        frame = frame.f_back
    return None


def _unscaled(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer | None) -> CompressionError | None:
    """An error if gradients were divided by the loss scale while, and before, they were averaged."""
    states = getattr(scaler, "_per_optimizer_states", {})
    stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
    if getattr(stage, "name", "READY") == "READY":
        return None
    return CompressionError(
        "gradients were unscaled before they were averaged: call optimizer.synchronize(), then scaler.unscale_(optimizer), and "
        "scaler.step(optimizer) under optimizer.skip_synchronize()"
    )


def _unhooked(optimizer: torch.optim.Optimizer | None) -> CompressionError | None:
    """An error if the optimizer trains what Horovod does not average, since it was added, or thawed, after it was wrapped."""
    hooked: set[torch.Tensor] = getattr(optimizer, "_requires_update", set())
    for number, group in enumerate(optimizer.param_groups if optimizer is not None and hooked else ()):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in hooked:
                return CompressionError(
                    f"a parameter of shape {list(parameter.shape)} in group {number} of the optimizer requires a gradient, and "
                    "did not when Horovod wrapped the optimizer: its gradients would not be averaged; make the compressor and "
                    "hvd.DistributedOptimizer anew"
                )
    return None
