"""Settings from the environment; a bad value is named with its variable."""

from __future__ import annotations

import os
from collections.abc import Sequence


def number(name: str, default: float, zero: bool = False) -> float:
    """A positive number, or zero where that has a meaning."""
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value == 0 and not zero):
        raise ValueError(f"{name} must be a positive number{' or 0' if zero else ''}, not {text!r}")
    return value


def count(name: str, default: int, most: int) -> int:
    """A whole number from 1 to `most`."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most}, not {text!r}")
    return int(text)


def choice(name: str, allowed: Sequence[str]) -> str | None:
    """One of some words, or None where nothing is set."""
    text = os.environ.get(name) or None
    if text is not None and text not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {text!r}")
    return text
