"""What methods tell of themselves, beside the mean or by it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..core import Array, Group, Stage


def relative(energy: float, whole: float) -> float:
    """A squared norm in units of another; 0 where that is zero."""
    return energy / whole if whole else 0.0


def abandoned(mean: Array) -> Array:
    """A mean that makes the session abandon the step: every rank gives the same, as every rank has seen the same sums."""
    return mean * np.float32("nan")


def ring_bytes(stages: Iterable[Stage], group: Group) -> float:
    """Bytes that a rank sends for allreduces of 4-byte elements, in a ring."""
    return 8 * sum(stage.length for stage in stages) * (group.size - 1) / group.size
