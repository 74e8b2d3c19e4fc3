"""Gradient compression for Horovod. The methods and the core; the adapters are `hvdcompress.torch` and the drivers."""

__version__ = "0.1.0"

from .core import Group, Layout
from .errors import CompressionError, MismatchError, PayloadError
from .reducers import Atomo, Dense, Dore, SketchedSGD, make, methods

__all__ = [
    "Atomo",
    "CompressionError",
    "Dense",
    "Dore",
    "Group",
    "Layout",
    "MismatchError",
    "PayloadError",
    "SketchedSGD",
    "__version__",
    "make",
    "methods",
]
