"""Memory for large vectors, used again when nothing refers to it any more.

A step makes about ten vectors of a bucket's size and lets go of them. Given back to the system, their pages would have to be
cleared and mapped anew each time, which takes longer than the arithmetic.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict

import numpy as np

from ..core import Array

LEAST = 1 << 16  # elements; smaller ones are the allocator's
PATIENCE = 1000  # vectors that are asked for before one that none of them wanted is given back
ALIGNMENT = 16  # elements of a cache's line, with which every vector begins: whole lines can be written without being read
# By their size, and where in them the part begins that is handed out.
_vectors: dict[int, list[tuple[Array, int]]] = defaultdict(list)
_last_use: dict[int, int] = {}  # of a size
_asked = 0
_lock = threading.Lock()


def empty(n: int) -> Array:
    """float32[n], whatever is in it."""
    global _asked
    if n < LEAST:
        return np.empty(n, np.float32)
    with _lock:
        _asked += 1
        _last_use[n] = _asked
        if _asked % PATIENCE == 0:
            _give_back()
        for vector, start in _vectors[n]:
            if sys.getrefcount(vector) == _ONLY_OURS:
                return vector[start : start + n]
        vector = np.empty(n + ALIGNMENT, np.float32)
        start = -(vector.ctypes.data // vector.itemsize) % ALIGNMENT
        _vectors[n].append((vector, start))
        return vector[start : start + n]


def _references() -> int:
    """How many there are to a vector that nobody uses, seen as `empty` sees them: it depends on the interpreter."""
    for vector, _ in [(np.empty(1, np.float32), 0)]:
        return sys.getrefcount(vector)
    raise AssertionError


_ONLY_OURS = _references()


def _give_back() -> None:
    """Forgets the vectors of sizes that nobody has asked for; those in use live on with their users."""
    for n in [n for n, last in _last_use.items() if last <= _asked - PATIENCE]:
        del _vectors[n], _last_use[n]
