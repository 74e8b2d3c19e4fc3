"""The norms that a block's scale may be."""

from __future__ import annotations

from .. import options

NORMS = ("max", "l2")


def check_blocks(block: object, norm: object) -> None:
    """Raises ValueError if these are no block size and no norm."""
    options.whole("block", block, 1, 1 << 31)
    options.choice("norm", norm, NORMS)
