"""A codec for each tensor of a bucket, by its shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import kernels
from ..core import Array, Bytes, Layout
from ..errors import CompressionError, PayloadError
from .codec import Codec, Encoded


@dataclass(frozen=True)
class PerTensor:
    """Each tensor of a bucket by a codec of its own, so that scales, budgets and matrices are a tensor's.

    Payload: uint32 a tensor, the size of its payload; then the tensors' payloads. Draws: those of each tensor's codec,
    with a key derived for the tensor. It cannot be cut.

    Args:
        parts: codec and shape of each tensor, in the order in which they lie in the bucket.
    """

    number: ClassVar[int] = 5

    parts: tuple[tuple[Codec, tuple[int, ...]], ...]

    @classmethod
    def of(cls, codec: Codec, layout: Layout) -> PerTensor:
        """The same codec for every tensor of a bucket."""
        return cls(tuple((codec, shape) for shape in layout.shapes))

    @property
    def unbiased(self) -> bool:
        return all(codec.unbiased for codec, _ in self.parts)

    @property
    def portable(self) -> bool:
        return all(codec.portable for codec, _ in self.parts)

    @property
    def alignment(self) -> int:
        return 0

    def encode(self, x: Array, key: int, start: int = 0) -> Encoded:
        encoded = [
            codec.encode(tensor, kernels.derive_key(key, number)) for number, (codec, tensor) in enumerate(self._tensors(x))
        ]
        lengths = [part.payload.size for part in encoded]
        if max(lengths, default=0) >> 32:
            raise CompressionError(
                f"the payload of a tensor has {max(lengths)} bytes, more than 32 bits can say: compress it more"
            )
        payload = np.concatenate([np.array(lengths, "<u4").view(np.uint8), *(part.payload for part in encoded)])
        return Encoded(payload, sum(part.noise for part in encoded))

    def decode_add(self, payload: Bytes, out: Array, factor: float = 1.0) -> float:
        head = 4 * len(self.parts)
        lengths = np.ascontiguousarray(payload[:head]).view("<u4").astype(np.int64) if payload.size >= head else np.zeros(0)
        if payload.size < head or head + lengths.sum() != payload.size:
            raise PayloadError(f"a payload of {len(self.parts)} tensors has {payload.size} bytes, and not those that it says")
        pieces = np.split(payload[head:], np.cumsum(lengths)[:-1])
        added, sent, most = out.copy(), 0.0, 0.0
        for piece, (codec, tensor) in zip(pieces, self._tensors(added)):
            least, *sizes = (codec.expected_bytes(tensor.shape, d) for d in (0.0, codec.decode_add(piece, tensor, factor), 1.0))
            sent, most = sent + sizes[0] - least, most + sizes[1] - least
        out[...] = added
        return sent / most if most else 1.0

    def expected_bytes(self, shape: tuple[int, ...], density: float | None = None) -> float:
        """The density of a bucket is the share of the bytes between those of nothing and of everything sent."""
        usual, least, most = (
            4.0 * len(self.parts) + sum(codec.expected_bytes(own, d) for codec, own in self.parts) for d in (None, 0.0, 1.0)
        )
        return usual if density is None else least + density * (most - least)

    def _tensors(self, x: Array) -> Iterator[tuple[Codec, Array]]:
        start = 0
        for codec, shape in self.parts:
            stop = start + math.prod(shape)
            yield codec, x[start:stop].reshape(shape)
            start = stop
