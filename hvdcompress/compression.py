"""`Compression`, as each adapter offers it: every method of the registry by name, and by a line of text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from . import spec
from .reducers import make, methods


class Methods(type):
    """The class of an adapter's `Compression`, which names its `compressor`, and Horovod's own `none` and `fp16`.

    `Compression.<name>(*given, **options)` makes `compressor(*given, method, **its options)`; options of the method and of
    the compressor are told apart by their names.
    """

    compressor: Callable[..., Any]

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name not in methods:
            raise AttributeError(_unknown(name))
        compressor = cls.compressor
        adapter = inspect.signature(compressor).parameters

        def compression(*given: Any, **options: Any) -> Any:
            known = [p.name for p in inspect.signature(compression).parameters.values() if p.kind is p.KEYWORD_ONLY]
            for option in options:
                if option not in known:
                    raise ValueError(f"the compression {name!r} has no option {option!r}; it has {', '.join(known)}")
            own = {key: options.pop(key) for key in list(options) if key in adapter}
            return compressor(*given, method=make(name, **options), **own)

        compression.__name__ = name
        compression.__doc__ = f"A `Compressor` with this method; its options may be given too.\n\n{methods[name].__doc__}"
        given = [p for p in adapter.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "method"]
        options = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(methods[name]).parameters.values()]
        further = [p for p in adapter.values() if p.kind is p.KEYWORD_ONLY]
        compression.__signature__ = inspect.Signature([*given, *options, *further])  # type: ignore[attr-defined]
        return compression

    def __dir__(cls) -> list[str]:
        return ["none", "fp16", "parse", *sorted(methods)]

    def parse(cls, text: str, *given: Any, **options: Any) -> Any:
        """What a line such as "none" or "atomo:atoms=spectral,budget=3" names, for scripts and command lines.

        Raises:
            ValueError: the name or an option is unknown, or out of its range.
        """
        name, read = spec.parse(text)
        if name in ("none", "fp16"):
            if read or options:
                raise ValueError(f"{text!r}: {name} has no options")
            return getattr(cls, name)
        if name not in methods:
            raise ValueError(_unknown(name))
        return getattr(cls, name)(*given, **{**read, **options})


def _unknown(name: str) -> str:
    return f"there is no compression {name!r}; there are {', '.join(['none', 'fp16', *sorted(methods)])}"
