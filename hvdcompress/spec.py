"""Methods and codecs by a line of text: `atomo:atoms=spectral,budget=3`.

Before the colon stands a name of the registry, after it options. In the options of a codec that is itself an option,
as in `gather:codec=levels:levels=7;block=512`, semicolons stand in place of commas.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def parse(text: str, separator: str = ",") -> tuple[str, dict[str, Any]]:
    """The name and the options of a line.

    Raises:
        ValueError: an option is not of the form name=value, or is given twice.
    """
    name, _, line = text.partition(":")
    options: dict[str, Any] = {}
    for option in filter(None, line.split(separator)):
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: {option!r} is not of the form name=value")
        if key in options:
            raise ValueError(f"{text!r}: {key} is given twice")
        options[key] = _value(value)
    return name, options


def build(kind: str, registry: Mapping[str, Callable[..., T]], text: str, further: Mapping[str, Any], separator: str = ",") -> T:
    """What a line names in a registry, made with its options and further ones, which come first.

    Args:
        kind: what the registry is of, for messages.

    Raises:
        ValueError: the name or an option is unknown, or out of its range.
    """
    name, options = parse(text, separator)
    options.update(further)
    if name not in registry:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(sorted(registry))}")
    known = inspect.signature(registry[name]).parameters
    for key in options:
        if key not in known:
            raise ValueError(f"the {kind} {name!r} has no option {key!r}; it has {', '.join(known) or 'none'}")
    return registry[name](**options)


def _value(text: str) -> Any:
    """A number, True, False or None where the text is one, in capitals or not; else the text."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text
