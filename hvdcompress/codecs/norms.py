"""The norms that a block's scale may be."""

from __future__ import annotations

NORMS = ("max", "l2")


def check_blocks(block: object, norm: object) -> None:
    """Raises ValueError if these are no block size and no norm."""
    if type(block) is not int or not 1 <= block <= 1 << 31:
        raise ValueError(f"block must be a whole number of elements from 1 to {1 << 31}, not {block!r}")
    if norm not in NORMS:
        raise ValueError(f"norm must be {' or '.join(map(repr, NORMS))}, not {norm!r}")
