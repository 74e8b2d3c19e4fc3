"""The methods, and their registry: the only list of them."""

from __future__ import annotations

from .. import spec
from ..core import Reducer
from .dense import Dense
from .dore import Diana, Dore, DoubleSqueeze, DoubleSqueezeTopK, MemSGD, TopKSGD
from .fetchsgd import FetchSGD
from .gather import QSGD, Atomo, Gather
from .sketched_sgd import SketchedSGD
from .sparse import LocalTopK, TrueTopK
from .terngrad import TernGrad, TernGradShared

__all__ = [
    "QSGD",
    "Atomo",
    "Dense",
    "Diana",
    "Dore",
    "DoubleSqueeze",
    "DoubleSqueezeTopK",
    "FetchSGD",
    "Gather",
    "LocalTopK",
    "MemSGD",
    "SketchedSGD",
    "TernGrad",
    "TernGradShared",
    "TopKSGD",
    "TrueTopK",
    "make",
    "methods",
]

methods: dict[str, type[Reducer]] = {
    "dense": Dense,
    "dore": Dore,
    "sketch": SketchedSGD,
    "atomo": Atomo,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "terngrad_shared": TernGradShared,
    "diana": Diana,
    "mem_sgd": MemSGD,
    "double_squeeze": DoubleSqueeze,
    "double_squeeze_topk": DoubleSqueezeTopK,
    "topk": TopKSGD,
    "local_topk": LocalTopK,
    "true_topk": TrueTopK,
    "fetchsgd": FetchSGD,
    "gather": Gather,
}


def make(text: str, **options: object) -> Reducer:
    """A method by its name in the registry, with options after a colon or by name.

    >>> make("dore", block=64)
    Dore(alpha=0.1, beta=1.0, eta=1.0, block=64, scales='float32', exchange='auto', rescale=False, uplink=None, downlink=None)
    >>> make("qsgd:levels=127,block=256")
    QSGD(levels=127, block=256, norm='l2', exchange='auto')

    Raises:
        ValueError: the name or an option is unknown, or out of its range.
    """
    return spec.build("method", methods, text, options)
