"""Which gradient is whose: the parameters that a compressor was given, their buckets, and how a tensor is recognised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Union

import torch

from ..adapter import Cut, Tensor
from ..errors import CompressionError

Parameters = Union[torch.nn.Module, Iterable[tuple[str, torch.nn.Parameter]]]


class UnboundError(CompressionError):
    """A tensor is the gradient of none of the parameters."""


class Bound(NamedTuple):
    """A parameter, and where its gradient goes: a bucket, or None for dense."""

    name: str
    parameter: torch.nn.Parameter
    bucket: int | None

    @property
    def kind(self) -> str:
        return f"{_dtype(self.parameter)}{list(self.parameter.shape)}"


class Binding:
    """The parameters that require a gradient, in reverse order, which is about that of their gradients.

    Args:
        parameters: the model, or pairs of name and parameter.
        cut: into buckets.
        optimizer: if given, no bucket has parameters of two of its groups.

    Raises:
        ValueError: there is nothing to train, or something that cannot be compressed.
    """

    def __init__(self, parameters: Parameters, cut: Cut, optimizer: torch.optim.Optimizer | None = None):
        trained = list(reversed(_trained(parameters)))
        for name, parameter in trained:
            if parameter.is_complex():
                raise ValueError(f"parameter {name!r} is complex, which compression does not support")
        owners = [_group_of(parameter, optimizer) for _, parameter in trained]
        where, self.layouts = cut.buckets(Tensor(name, tuple(p.shape), owner) for (name, p), owner in zip(trained, owners))
        self.bounds = [Bound(name, parameter, bucket) for (name, parameter), bucket in zip(trained, where)]

    def find(self, tensor: torch.Tensor, arrived: Collection[int], expected: Sequence[int]) -> int:
        """The number of the parameter whose gradient a tensor is.

        Horovod gives no name, and a gradient's address changes every step; but it is the parameter's `grad` itself.

        Args:
            arrived: numbers of the gradients of this step that came before.
            expected: the order in which they came in the last step.

        Raises:
            UnboundError: it is the gradient of none of them.
            CompressionError: it is a parameter, and no gradient.
        """
        place = len(arrived)
        if place < len(expected) and self.bounds[expected[place]].parameter.grad is tensor:
            return expected[place]
        for number, bound in enumerate(self.bounds):
            if bound.parameter.grad is tensor:
                return number
            if bound.parameter is tensor:
                raise CompressionError(
                    "op=hvd.Adasum is not supported: it combines parameters, not gradients; use hvd.Average or hvd.Sum"
                )
        return self._find_densified(tensor, arrived)

    def _find_densified(self, tensor: torch.Tensor, arrived: Collection[int]) -> int:
        """The same for a sparse gradient of which Horovod made a dense copy, as `sparse_as_dense` asks."""
        sparse: list[tuple[int, torch.Tensor]] = []
        for number, bound in enumerate(self.bounds):
            gradient = bound.parameter.grad
            if number not in arrived and gradient is not None and gradient.is_sparse and gradient.shape == tensor.shape:
                sparse.append((number, gradient))
        if len(sparse) > 1:  # two embeddings of one shape: only their content tells them apart
            sparse = [(number, gradient) for number, gradient in sparse if _same(gradient.to_dense(), tensor)]
        if not sparse:
            raise UnboundError(
                f"a gradient of {_dtype(tensor)}{list(tensor.shape)} belongs to none of the {len(self.bounds)} parameters that "
                "the compressor was given: give it the whole model, all of whose trained parameters require a gradient by "
                "then, or unbound='dense'"
            )
        return sparse[0][0]

    def missing(self, arrived: Collection[int]) -> CompressionError | None:
        """An error if the gradient of a parameter did not come."""
        lost = [bound for number, bound in enumerate(self.bounds) if number not in arrived]
        if not lost:
            return None
        gradient = lost[0].parameter.grad
        way_out = (
            "its gradient is sparse: give DistributedOptimizer sparse_as_dense=True, or the layer sparse=False"
            if gradient is not None and gradient.is_sparse
            else "give the compressor only what the optimizer trains"
        )
        return CompressionError(
            f"parameter {lost[0].name!r} was given to the compressor but no gradient of it came ({len(lost)} of "
            f"{len(self.bounds)} are missing): {way_out}"
        )

    def learning_rate(self, bucket: int, optimizer: torch.optim.Optimizer) -> float | None:
        """The rate of a bucket's parameters."""
        group = _group_of(next(bound.parameter for bound in self.bounds if bound.bucket == bucket), optimizer)
        return float(group["lr"]) if group else None

    def limits(self, scale: float) -> list[float]:
        """Of each bucket, what its means may be in magnitude, so that none overflows its parameter's dtype times `scale`."""
        limits = [math.inf] * len(self.layouts)
        for bound in self.bounds:
            if bound.bucket is not None:
                limits[bound.bucket] = min(limits[bound.bucket], torch.finfo(bound.parameter.dtype).max / scale)
        return limits

    def facts(self) -> dict[str, str]:
        """What the ranks must agree on of the tensors."""
        return {
            f"tensor {bound.name}": f"{bound.kind}, " + ("dense" if bound.bucket is None else f"in bucket {bound.bucket}")
            for bound in self.bounds
        }


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are equal, or both NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _group_of(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    for group in optimizer.param_groups if optimizer else ():
        if any(parameter is member for member in group["params"]):
            return group
    return None


def _trained(parameters: Parameters) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that require a gradient, each once, by names of their own."""
    pairs = list(parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise ValueError("give the compressor a model, or its named_parameters(): pairs of name and parameter")
    trained: list[tuple[str, torch.nn.Parameter]] = []
    seen: set[int] = set()
    for name, parameter in pairs:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            trained.append((name, parameter))
    if not trained:
        raise ValueError("there is no parameter that requires a gradient")
    (name, times), *_ = Counter(name for name, _ in trained).most_common(1)
    if times > 1:
        raise ValueError(f"{times} parameters have the name {name!r}: names must be unique")
    return trained
