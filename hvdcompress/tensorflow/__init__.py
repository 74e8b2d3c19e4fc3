"""TensorFlow and Keras: compressors for Horovod's `DistributedOptimizer` and `DistributedGradientTape`.

    import horovod.tensorflow.keras as hvd
    import hvdcompress.tensorflow as hvc

    optimizer = hvc.DistributedOptimizer(optimizer, compression=hvc.Compression.dore())

makes Horovod's optimizer and *binds* it: gradients then go in buckets, by the variables that they belong to. Horovod's own
`hvd.DistributedOptimizer(optimizer, compression=hvc.Compression.dore())` is bound by `hvdcompress.keras.CompressionCallback`
in `fit`, or by `attach`; unbound it reduces tensor by tensor, more slowly.
"""

from __future__ import annotations

import horovod.tensorflow as hvd

from ..compression import Methods
from ..errors import CompressionError, MismatchError, PayloadError
from .binding import DistributedGradientTape, DistributedOptimizer, attach
from .compressor import Compressor

__all__ = [
    "Compression",
    "CompressionError",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "MismatchError",
    "PayloadError",
    "attach",
]


class Compression(metaclass=Methods):
    """What may be given as `compression=`: `none` and `fp16` are Horovod's own, the others are this project's methods.

    `Compression.dore(block=64, scales="byte")`: options of the method and of `Compressor`, by name.
    `Compression.parse("dore:block=64")` reads a line of text.
    """

    compressor = Compressor
    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
