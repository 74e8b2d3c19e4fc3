"""Options of a method that change from epoch to epoch."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any, Union

ByEpoch = Union[Mapping[int, Any], Callable[[int], Any]]


class Schedule:
    """What some options are in each epoch.

    Args:
        options: by name, a function of the epoch; or values by the epoch, counted from 0, from which each holds.

    Raises:
        ValueError: no value is given for the first epoch.

    >>> schedule = Schedule({"ratio": {0: 0.2, 3: 0.05}})
    >>> [schedule(epoch)["ratio"] for epoch in range(5)]
    [0.2, 0.2, 0.2, 0.05, 0.05]
    """

    def __init__(self, options: Mapping[str, ByEpoch]):
        if not options:
            raise ValueError("a schedule needs an option, such as ratio={0: 0.2, 5: 0.05}")
        for name, by_epoch in options.items():
            if not callable(by_epoch) and 0 not in by_epoch:
                raise ValueError(f"{name} has no value for epoch 0; give a function, or values by the epoch that they begin with")
        self.options = dict(options)

    def __call__(self, epoch: int) -> dict[str, Any]:
        """The options in an epoch."""
        return {name: _value(by_epoch, epoch) for name, by_epoch in self.options.items()}


def _value(by_epoch: ByEpoch, epoch: int) -> Any:
    if callable(by_epoch):
        return by_epoch(epoch)
    begins = sorted(by_epoch)
    return by_epoch[begins[bisect.bisect_right(begins, epoch) - 1]]
