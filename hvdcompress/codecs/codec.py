"""What a codec is: stateless and local; a float32 tensor to bytes and back."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from ..core import Array, Bytes


class Encoded(NamedTuple):
    """A payload, and the expected squared error E||decode(payload) - x||^2 over the draws."""

    payload: Bytes
    noise: float


class Codec(Protocol):
    """A frozen dataclass of options, all of them hashable, with these members.

    A tensor is contiguous and of any shape. Most codecs see its elements only, in order; some go by the shape. An element
    may be NaN or infinite, where a residual has overflowed: something then has to decode to what is not finite, and the
    step is abandoned.
    """

    number: ClassVar[int]
    """Names the codec in frames: from 1 to 254, its own, and never used again for another. A new one is no new format."""

    @property
    def unbiased(self) -> bool:
        """E decode(encode(x)) = x. Else it is a contraction, E||decode(encode(x)) - x||^2 < ||x||^2, and wants feedback."""

    @property
    def portable(self) -> bool:
        """The same bytes on every processor: needed where each rank encodes the mean by itself."""

    @property
    def alignment(self) -> int:
        """In elements: a vector may be cut at multiples of it, and its pieces have the codes they have in the whole.

        0 if it may not be cut at all.
        """

    def encode(self, x: Array, key: int, start: int = 0) -> Encoded:
        """Packs float32[...]; `key` is of the draws, and x lies at `start` (a multiple of `alignment`) in its bucket."""

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        """Adds factor * decoded to float32[...] in place; returns the density, the share of elements (or atoms) sent.

        Raises:
            PayloadError: the payload is not one of such a tensor; `out` is then as it was.
        """

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        """Size of the payload of a tensor of which the share `density` is sent (None: what is usual)."""
