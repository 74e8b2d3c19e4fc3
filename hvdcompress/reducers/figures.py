"""What methods tell of themselves beside the mean."""

from __future__ import annotations

from .. import kernels
from ..core import Array


def relative(energy: float, x: Array) -> float:
    """A squared norm in units of ||x||^2; 0 where x is zero."""
    norm = kernels.sum_of_squares(x)
    return energy / norm if norm else 0.0
