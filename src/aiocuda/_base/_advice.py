"""Advice: warnings about slow ways to use a device. Each is given once for each place in the program."""

from __future__ import annotations

import os
from typing import Final

from ..errors import InvalidArgumentError, PerformanceWarning
from ._types import SourceLine

__all__ = ["advise", "is_advice_wanted"]

_VARIABLE: Final = "AIOCUDA_WARN"

#: The topics and places of the advice that was given: at most one entry for each line of the program and each topic.
_given: set[tuple[str, str, int]] = set()


def is_advice_wanted() -> bool:
    """Return False if ``AIOCUDA_WARN`` is 0."""
    wanted = os.environ.get(_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise InvalidArgumentError(f"{_VARIABLE}={wanted!r}: it takes 1 or 0", variable=_VARIABLE)
    return wanted != "0"


def advise(topic: str, line: SourceLine, message: str) -> None:
    """Issue a `PerformanceWarning` for a line of the program, unless it was issued before.

    A filter of Python may turn it into an exception, which this function raises.
    """
    place = topic, line.file, line.line
    if place not in _given:
        _given.add(place)
        line.warn(f"{message}. {_VARIABLE}=0 disables this advice", PerformanceWarning)
