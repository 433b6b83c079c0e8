"""Checks of arguments that several packages use."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
import operator
import sys
from inspect import CO_COROUTINE
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from ..errors import InvalidArgumentError, InvalidTypeError

__all__ = [
    "as_count", "as_integer", "check_callback", "check_deadline", "check_integer", "check_seconds", "check_timeout",
    "flag", "has_gil", "is_coroutine_function", "is_function", "is_plain", "several",
]  # fmt: skip


#: Seconds. A deadline beyond it is a time of day, as ``time.time() + 1``.
MOST_DEADLINE = 86_400.0


def flag(value: object, name: str) -> bool:
    """Return the truth value of an argument. Raise `InvalidTypeError` if it has none, and for text: "no" is true."""
    if value is True or value is False:
        return value
    if not isinstance(value, (str, bytes)):
        with contextlib.suppress(TypeError, ValueError):  # for example of an array of several items
            return bool(value)
    raise InvalidTypeError(f"{name} is True or False, not {value!r}")


def check_integer(value: object, name: str) -> None:
    """Raise `InvalidTypeError` unless the argument is an int. A bool is refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        given = "an array: its number of items is array.size" if getattr(value, "shape", None) else repr(value)
        raise InvalidTypeError(f"{name} is an integer, not {given}")


def as_integer(value: object) -> Any:
    """Return an int for an object with ``__index__``, such as NumPy's integers; a bool and anything else unchanged."""
    if isinstance(value, (int, np.bool_)) or not hasattr(type(value), "__index__"):
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # an array has `__index__`, and refuses it unless it is a scalar
        return value


def as_count(value: Any, name: str, least: int = 1) -> int:
    """Return an integer argument as an int. Raise `InvalidArgumentError` if it is below ``least``."""
    value = as_integer(value)
    check_integer(value, name)
    if value < least:
        raise InvalidArgumentError(f"{name} is at least {least}, not {value}", argument=name)
    return int(value)


def check_seconds(value: float, name: str) -> float:
    """Return an argument that is a number of seconds, 0 or more, as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidTypeError(f"{name} is a number of seconds, not {value!r}")
    if not value >= 0:  # also false for NaN
        raise InvalidArgumentError(f"{name} is 0 seconds or more, and this is {value}", argument=name)
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgumentError(f"{name} is more seconds than a float holds", argument=name) from None


def check_duration(value: float, name: str) -> float:
    """Return a time that something took, in seconds, as a float; it is finite."""
    seconds = check_seconds(value, name)
    if seconds == float("inf"):
        raise InvalidArgumentError(f"{name} is a finite number of seconds, and this is infinite", argument=name)
    return seconds


def check_timeout(value: float | None, name: str = "timeout") -> float | None:
    """Return a timeout in seconds; None for no limit, which None and infinity mean."""
    seconds = None if value is None else check_seconds(value, name)
    return None if seconds == float("inf") else seconds


def check_deadline(deadline_s: float | None) -> float | None:
    """Return a deadline in seconds from now; None for no deadline, which None and infinity mean.

    A negative one has passed: a program that subtracts times has made no mistake. The caller raises `DeadlineError`.
    """
    if isinstance(deadline_s, (int, float)) and deadline_s < 0:
        return -check_seconds(-deadline_s, "deadline_s")
    if isinstance(deadline_s, float) and math.isnan(deadline_s):
        raise InvalidArgumentError("deadline_s is a number of seconds from now, and this is nan", argument="deadline_s")
    seconds = check_timeout(deadline_s, "deadline_s")
    if seconds is not None and seconds > MOST_DEADLINE:
        raise InvalidArgumentError(
            f"deadline_s is in seconds from now, not a time of day, and at most a day: this is {seconds:.0f}. "
            "None sets no limit",
            argument="deadline_s",
        )
    return seconds


def several(things: Any, what: str) -> list[Any]:
    """Return the items of an iterable. Raise `InvalidTypeError`, with the rule ``what``, for a string or no iterable.

    An array without dimensions is refused as well: it has ``__iter__``, which raises a TypeError.
    """
    if isinstance(things, (str, bytes)):
        raise InvalidTypeError(f"{what}, not {things!r}")
    try:
        each = iter(things)
    except TypeError:
        raise InvalidTypeError(f"{what}, not {things!r}") from None
    return list(each)


def has_gil() -> bool:
    """Return whether one thread runs Python at a time; False in free-threaded Python."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def is_plain(thing: Any) -> bool:
    """Return whether a thing is a plain function or method, and no coroutine function. False if that is not clear."""
    plain = thing.__func__ if type(thing) is MethodType else thing
    return type(plain) is FunctionType and not plain.__dict__ and not plain.__code__.co_flags & CO_COROUTINE


def is_coroutine_function(function: Any) -> bool:
    """Return whether a call makes a coroutine. Unlike `inspect`, this looks at ``__call__`` of an object, too."""
    if is_plain(function):  # usual, and 3 µs faster than `inspect`
        return False
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_function(thing: object) -> bool:
    """Return whether a thing can be called; False for a kernel, because calling it only raises an error."""
    return callable(thing) and getattr(type(thing), "_is_function", True)


def check_callback(fn: object, context: object = None) -> None:
    """Check the arguments of ``add_done_callback`` when it is called: a later error would reach no caller."""
    if not is_plain(fn):  # else it is a function, and no coroutine function
        if not is_function(fn):
            raise InvalidTypeError(f"a callback is a function, not {fn!r}")
        if is_coroutine_function(fn):
            raise InvalidTypeError(f"a callback is a plain function, and {fn!r} is a coroutine function: create a task")
    if context is not None and not isinstance(context, contextvars.Context):
        raise InvalidTypeError(f"context is a contextvars.Context, not {context!r}")
