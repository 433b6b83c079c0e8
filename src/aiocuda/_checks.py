"""Checks: flags and functions that a caller gives."""

from __future__ import annotations

import contextvars
import functools
import inspect
from typing import Any

from .errors import InvalidTypeError

__all__ = ["check_callback", "flag", "is_coroutine_function", "is_function", "several"]


def flag(value: object, name: str) -> bool:
    """True or False, or what Python takes for one of them."""
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except (TypeError, ValueError):  # an array, say, which has as many truths as items
        raise InvalidTypeError(f"{name} is True or False, not {value!r}") from None


def several(things: Any, what: str) -> list[Any]:
    """Things that can be gone through: a sequence of names, say, and not one name. An array of no dimension cannot."""
    if isinstance(things, (str, bytes)):
        raise InvalidTypeError(f"{what}, not {things!r}")
    try:
        each = iter(things)
    except TypeError:
        raise InvalidTypeError(f"{what}, not {things!r}") from None
    return list(each)


def is_coroutine_function(function: Any) -> bool:
    """Does calling it make a coroutine? That of an object whose ``__call__`` is one, too, which `inspect` overlooks."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_function(thing: object) -> bool:
    """Return whether a thing can be called; False for a kernel, whose call only raises an error with the cure."""
    return callable(thing) and getattr(type(thing), "_is_function", True)


def check_callback(fn: object, context: object = None) -> None:
    """What is to be called later can be: then there is nobody left to tell."""
    if not is_function(fn):
        raise InvalidTypeError(f"a callback is a function, not {fn!r}")
    if context is not None and not isinstance(context, contextvars.Context):
        raise InvalidTypeError(f"context is a contextvars.Context, not {context!r}")
