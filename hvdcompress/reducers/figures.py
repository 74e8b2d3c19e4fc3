"""What methods tell of themselves, beside the mean or by it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .. import kernels
from ..core import Array, Group, Stage


def relative(energy: float, x: Array) -> float:
    """A squared norm in units of ||x||^2; 0 where x is zero."""
    norm = kernels.sum_of_squares(x)
    return energy / norm if norm else 0.0


def abandoned(mean: Array) -> Array:
    """A mean that makes the session abandon the step: every rank gives the same, as every rank has seen the same sums."""
    return mean * np.float32("nan")


def ring_bytes(stages: Iterable[Stage], group: Group) -> float:
    """Bytes that a rank sends for allreduces of 4-byte elements, in a ring."""
    return 8 * sum(stage.length for stage in stages) * (group.size - 1) / group.size
