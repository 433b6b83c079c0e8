"""How the library treats an exception that a function of the program raises.

The rules are those of `asyncio.Task`, at every place that calls a function of the program for a waiter:

1. An exception fails the operation, node, stage or step, and reaches its waiter as the same object.
2. `KeyboardInterrupt` and `SystemExit` also leave the event loop, after the waiter's state is set.
3. A plain function cannot be cancelled and ends no iteration. A `CancelledError`, `StopIteration` or
   `StopAsyncIteration` that it raises becomes the ``__cause__`` of a `RuntimeError`. A coroutine that is cancelled
   stays cancelled.

A callback without a waiter follows `asyncio.Handle`: the loop's exception handler gets what it raises, except
`KeyboardInterrupt` and `SystemExit`, which leave the loop. A kernel's host implementation is different, too: its
exception becomes the cause of a `DeviceFault`, see `aiocuda.driver.software._work`.
"""

from __future__ import annotations

import contextlib
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

__all__ = ["LEAVES_LOOP", "SIGNALS", "add_note", "call", "failure_of", "function_name"]

P = ParamSpec("P")
T = TypeVar("T")

#: Exceptions that leave the event loop, as from an `asyncio.Task`.
LEAVES_LOOP: Final = (KeyboardInterrupt, SystemExit)

#: Exceptions that have another meaning in a coroutine or a generator than a failed function.
SIGNALS: Final = (CancelledError, StopIteration, StopAsyncIteration)


def failure_of(error: BaseException) -> BaseException:
    """Return the exception for the waiter of a plain function: the same object, or a `RuntimeError` caused by it."""
    if not isinstance(error, SIGNALS):
        return error
    meaning = "cancels no task" if isinstance(error, CancelledError) else "ends no iteration"
    failure = RuntimeError(f"a function raised {type(error).__name__}, which {meaning} there")
    failure.__cause__ = error
    return failure


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless it has the note: a function may raise the same object again and again."""
    with contextlib.suppress(TypeError, AttributeError):  # its class refuses notes, as a frozen dataclass does
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a plain function and return its result. If it raises, raise `failure_of` its exception."""
    try:
        return function(*args, **kwargs)
    except SIGNALS as error:
        raise failure_of(error) from error


def function_name(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, or the type of another callable."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
