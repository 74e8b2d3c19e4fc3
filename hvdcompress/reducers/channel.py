"""One codec, for one bucket in one step: vectors to frames and frames to vectors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import frame, kernels
from ..codecs import Codec, Encoded, Ternary
from ..core import Array, Bytes
from ..errors import PayloadError

ZERO = np.zeros(1, np.float32)


class Channel(NamedTuple):
    codec: Codec
    bucket: int
    step: int

    def pack(self, x: Array, key: int, start: int = 0, minus: Array | None = None) -> Encoded:
        """The frame of a vector, or of what is left of it without `minus`, that lies at `start` in the bucket."""
        if minus is None:
            payload, noise = self.codec.encode(x, key, start)
        elif isinstance(self.codec, Ternary):  # in one pass over the memory
            payload, noise = self.codec.encode(x, key, start, minus)
        else:
            payload, noise = self.codec.encode(kernels.weighted_sum((1.0, x), (-1.0, minus)), key, start)
        return Encoded(frame.pack(self._address(x.size), payload), noise)

    def add(self, buffer: Bytes, sender: int, out: Array, factor: float = 1.0, base: Array | None = None) -> float:
        """Adds factor * (what the sender's frame holds) to `out`, or to `base`, the sum going to `out`.

        A base of one element, as `ZERO`, stands for a vector of it.

        Returns:
            The share of it that was sent.

        Raises:
            PayloadError: the frame is not what `sender` should have sent; `out` is then as it was, or a copy of `base`.
        """
        payload = frame.unpack(buffer, self._address(out.size), sender)
        try:
            if base is not None:
                if isinstance(self.codec, Ternary):
                    return self.codec.decode_add(payload, out, factor, base)  # in one pass over the memory
                out[...] = base
            return self.codec.decode_add(payload, out, factor)
        except PayloadError as error:
            raise PayloadError(f"the frame from rank {sender} does not decode: {error}") from error

    def _address(self, elements: int) -> frame.Address:
        return frame.Address(self.codec.number, self.bucket, self.step, elements)
