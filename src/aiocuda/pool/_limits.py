"""Limits: numbers that a caller gives, checked."""

from __future__ import annotations

from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = ["seconds_of", "timeout_of"]


def seconds_of(value: float, name: str) -> float:
    """A number of seconds, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(f"{name} is a number of seconds, not {value!r}")
    if not value >= 0:  # NaN is not
        raise InvalidArgumentError(f"{name} is 0 seconds or more, and this is {value}", argument=name)
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgumentError(f"{name} is more seconds than a float holds", argument=name) from None


def timeout_of(value: float | None) -> float | None:
    """Seconds to wait at most; None, also for infinity: no limit."""
    seconds = None if value is None else seconds_of(value, "timeout")
    return None if seconds == float("inf") else seconds
