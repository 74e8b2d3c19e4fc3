"""PyTorch: compressors for the `compression=` argument of Horovod's `DistributedOptimizer`.

    import horovod.torch as hvd
    import hvdcompress.torch as hvc

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=hvc.Compression.dore(model))

`Compression` is what a user needs; `Compressor` is what its functions make.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd

from .. import spec
from ..errors import CompressionError, MismatchError, PayloadError
from ..reducers import make, methods
from .binding import Parameters
from .compressor import Compressor

__all__ = ["Compression", "CompressionError", "Compressor", "MismatchError", "PayloadError"]


class _Methods(type):
    """Offers every method of the registry as `Compression.<name>(parameters, **options)`."""

    def __getattr__(cls, name: str) -> Callable[..., Compressor]:
        if name not in methods:
            raise AttributeError(f"there is no compression {name!r}; there are {', '.join(['none', 'fp16', *sorted(methods)])}")

        adapter = inspect.signature(Compressor).parameters

        def compression(parameters: Parameters, **options: Any) -> Compressor:
            own = {key: options.pop(key) for key in list(options) if key in adapter}
            return Compressor(parameters, make(name, **options), **own)

        compression.__name__ = name
        compression.__doc__ = f"A `Compressor` with this method; its options may be given too.\n\n{methods[name].__doc__}"
        first = adapter["parameters"]
        options = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(methods[name]).parameters.values()]
        further = [p for p in adapter.values() if p.kind is p.KEYWORD_ONLY]
        compression.__signature__ = inspect.Signature([first, *options, *further])  # type: ignore[attr-defined]
        return compression

    def __dir__(cls) -> list[str]:
        return ["none", "fp16", "parse", *sorted(methods)]


class Compression(metaclass=_Methods):
    """What may be given as `compression=`: `none` and `fp16` are Horovod's own, the others are this project's methods.

    `Compression.dore(model, block=64, scales="byte")`: the first argument is the model or its named parameters; options
    of the method and of `Compressor` follow by name.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @classmethod
    def parse(cls, text: str, parameters: Parameters, **options: Any) -> Any:
        """What a line such as "none" or "atomo:atoms=spectral,budget=3" names, for scripts and command lines.

        Raises:
            ValueError: the name or an option is unknown, or out of its range.
        """
        name, given = spec.parse(text)
        if name in ("none", "fp16"):
            if given or options:
                raise ValueError(f"{text!r}: {name} has no options")
            return getattr(cls, name)
        if name not in methods:
            raise ValueError(f"there is no compression {name!r}; there are {', '.join(['none', 'fp16', *sorted(methods)])}")
        known = list(inspect.signature(getattr(cls, name)).parameters)[1:]
        for option in given:
            if option not in known:
                raise ValueError(f"the compression {name!r} has no option {option!r}; it has {', '.join(known)}")
        return getattr(cls, name)(parameters, **{**given, **options})
