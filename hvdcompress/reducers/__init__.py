"""The methods, one file each, and their registry: the only list of them."""

from __future__ import annotations

from ..core import Reducer
from .dense import Dense
from .dore import Dore
from .sketched_sgd import SketchedSGD

__all__ = ["Dense", "Dore", "SketchedSGD", "make", "methods"]

methods: dict[str, type] = {"dense": Dense, "dore": Dore, "sketch": SketchedSGD}


def make(name: str, **options: object) -> Reducer:
    """A method by its name in the registry.

    >>> make("dore", block=64)
    Dore(alpha=0.1, beta=1.0, eta=1.0, block=64, scales='float32', exchange='auto', rescale=False, uplink=None, downlink=None)

    Raises:
        ValueError: the name is unknown, or an option is out of its range.
        TypeError: the method has no such option.
    """
    if name not in methods:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(sorted(methods))}")
    method: Reducer = methods[name](**options)
    return method
