"""Checks of options: each raises ValueError with the option's name, what it may be, and what it is."""

from __future__ import annotations

import math
from collections.abc import Iterable


def number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> None:
    """A real number from `low` to `high`, the ends included unless it has to be `above` and `below` them."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if is_one and (low < value or (low == value and not above)) and (value < high or (value == high and not below)):  # type: ignore[operator]
        return
    if high == math.inf:
        raise ValueError(f"{name} must be a number {'above' if above else 'of at least'} {low:g}, not {value!r}")
    raise ValueError(f"{name} must be in {'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}, not {value!r}")


def whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """A whole number from `low` to `high`."""
    if type(value) is not int or value < low or (high is not None and value > high):
        raise ValueError(
            f"{name} must be a whole number {f'from {low} to {high}' if high else f'of at least {low}'}, not {value!r}"
        )


def choice(name: str, value: object, known: Iterable[str]) -> None:
    """One of some words."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, not {value!r}")


def flag(name: str, value: object) -> None:
    """True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name} must be True or False, not {value!r}")
