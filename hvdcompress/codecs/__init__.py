"""Codecs, one file each, and their registry: the only list of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from .. import spec
from .atoms import Entrywise, Fourier
from .codec import Codec, Encoded
from .identity import Identity
from .levels import Levels
from .per_tensor import PerTensor
from .spectral import Spectral
from .ternary import Ternary
from .top_k import TopK

__all__ = [
    "Codec",
    "Encoded",
    "Entrywise",
    "Fourier",
    "Identity",
    "Levels",
    "PerTensor",
    "Spectral",
    "Ternary",
    "TopK",
    "codec_of",
    "codecs",
    "make",
]

codecs: dict[str, Callable[..., Codec]] = {
    "entrywise": Entrywise,
    "fourier": Fourier,
    "identity": Identity,
    "levels": Levels,
    "spectral": Spectral,
    "ternary": Ternary,
    "topk": TopK,
}


def make(text: str, **options: object) -> Codec:
    """A codec by its name in the registry, with options after a colon or by name.

    >>> make("levels:levels=7;block=256")
    Levels(levels=7, block=256, norm='l2')

    Raises:
        ValueError: the name or an option is unknown, or out of its range.
    """
    return spec.build("codec", codecs, text, options, separator=";")


_named = lru_cache(maxsize=256)(make)


def codec_of(codec: Codec | str) -> Codec:
    """A codec, or what its name with options makes.

    Raises:
        ValueError: it is neither, or has no number of its own.
    """
    if isinstance(codec, str):
        return _named(codec)
    if isinstance(codec, type) or not all(hasattr(codec, name) for name in ("encode", "decode_add", "alignment", "number")):
        raise ValueError(f"a codec must be an object such as Ternary(), or a name with options, not {codec!r}")
    if not 1 <= codec.number <= 254:
        raise ValueError(f"a codec's number must be from 1 to 254, and {codec} has {codec.number}")
    return codec
