"""Codecs: stateless and local; a float32 vector to bytes and back. One file each; `codecs` lists them by name."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ..core import Array, Bytes
from .identity import Identity
from .ternary import Ternary

__all__ = ["Codec", "Identity", "Ternary", "codecs"]


class Codec(Protocol):
    """A frozen dataclass of options with these members."""

    number: ClassVar[int]  # names the codec in frames: from 1 to 254, its own, and never used again for another

    @property
    def alignment(self) -> int:
        """In elements: a vector may be cut at multiples of it, and its pieces have the codes they have in the whole."""

    def encode(self, x: Array, key: int, start: int = 0) -> Bytes:
        """Packs float32[n]; `key` is of the draws, and x lies at `start` (a multiple of `alignment`) in its bucket."""

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        """Adds factor * decoded to float32[n] in place; returns the share of elements that are not zero.

        Raises:
            PayloadError: the payload is not one of n elements; `out` is then as it was.
        """

    def expected_bytes(self, n: int, density: float | None = None) -> float:
        """Size of a payload of n elements, of which the share `density` is not zero (None: what is usual)."""

    def noise(self, x: Array) -> float:
        """The expected squared error E||decode(encode(x)) - x||^2."""


codecs: dict[str, type[Codec]] = {"identity": Identity, "ternary": Ternary}
