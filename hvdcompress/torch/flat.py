"""The gradients of a step, as the vectors that buckets are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..core import Array, Layout


class Flat:
    """Vectors of buckets, float32[layout.size] each.

    A gradient that is all of its bucket, and float32 in this machine's memory, is not copied: until the step has begun with the
    bucket it must stay as it is, and Horovod's hooks see to that, as they do for its own collectives.
    """

    def __init__(self, layouts: Sequence[Layout]):
        self._layouts = layouts
        self._rooms: dict[int, Array] = {}  # of buckets whose gradients are copied
        self._here: dict[int, Array] = {}  # of the step that is going on

    def put(self, bucket: int, name: str, gradient: torch.Tensor, scale: float) -> None:
        """Takes a gradient, divided by `scale`."""
        vector = gradient.detach().reshape(-1)
        layout = self._layouts[bucket]
        if len(layout.names) == 1 and scale == 1 and vector.dtype == torch.float32 and vector.device.type == "cpu":
            self._here[bucket] = vector.numpy()
            return
        self._here[bucket] = room = self._room(bucket)
        copied = torch.from_numpy(room)[layout.slices[name]].copy_(vector)
        if scale != 1:
            copied.div_(scale)

    def take(self, bucket: int) -> Array:
        """A bucket's vector, whose gradients are there; if none has come it is whatever it was."""
        return self._here.pop(bucket) if bucket in self._here else self._room(bucket)

    def _room(self, bucket: int) -> Array:
        if bucket not in self._rooms:
            self._rooms[bucket] = np.zeros(self._layouts[bucket].size, np.float32)
        return self._rooms[bucket]
