"""PyTorch: compressors for the `compression=` argument of Horovod's `DistributedOptimizer`.

    import horovod.torch as hvd
    import hvdcompress.torch as hvc

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=hvc.Compression.dore(model))

`Compression` is what a user needs; `Compressor` is what its functions make.
"""

from __future__ import annotations

import horovod.torch as hvd

from ..compression import Methods
from ..errors import CompressionError, MismatchError, PayloadError
from ..schedule import ByEpoch, Schedule
from .compressor import Compressor
from .regroup import keep_in_elastic_states

__all__ = ["Compression", "CompressionError", "CompressionSchedule", "Compressor", "MismatchError", "PayloadError"]


keep_in_elastic_states(Compressor)


class Compression(metaclass=Methods):
    """What may be given as `compression=`: `none` and `fp16` are Horovod's own, the others are this project's methods.

    `Compression.dore(model, block=64, scales="byte")`: the first argument is the model or its named parameters; options
    of the method and of `Compressor` follow by name. `Compression.parse("dore:block=64", model)` reads a line of text.
    """

    compressor = Compressor
    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16


class CompressionSchedule:
    """Changes options of the method from epoch to epoch, in the way of `torch.optim.lr_scheduler`.

    `schedule = CompressionSchedule(compression, ratio={0: 0.2, 3: 0.05})`, and `schedule.step()` after each epoch, on every
    rank.

    Args:
        compression: the compressor.
        epoch: the one that comes first; another than 0 when training is taken up again.
        options: as `hvdcompress.schedule.Schedule` takes them.

    Raises:
        ValueError: an option is unknown, out of its range, or cannot be changed during training.
    """

    def __init__(self, compression: Compressor, *, epoch: int = 0, **options: ByEpoch):
        self.compression, self.epoch, self._schedule = compression, epoch, Schedule(options)
        compression.change(**self._schedule(epoch))

    def step(self) -> None:
        """Goes on to the next epoch."""
        self.epoch += 1
        self.compression.change(**self._schedule(self.epoch))
