"""`per_step`: runs each step of a coroutine in a state of its thread that no other coroutine sees."""

from __future__ import annotations

import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from .._base._checks import is_coroutine_function
from ..errors import InvalidTypeError

__all__ = ["per_step"]

P = ParamSpec("P")
T = TypeVar("T")


def per_step(
    enter: Callable[[], AbstractContextManager[object]], *, before: Callable[[], Awaitable[object] | None] | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Return a decorator for coroutine functions, whose coroutines leave a state of the thread at each await.

    Between two awaits a coroutine runs without interruption: that is a step. A plain ``with`` block around an ``await``
    changes the state of the thread for every task that runs meanwhile.

    Parameters
    ----------
    enter
        Called when a coroutine takes its first step. It returns a context manager, which is entered before each step of
        that coroutine and left after it, also before steps that begin with an exception, a cancellation or a close.
        If leaving it raises, or entering it before a later step, the coroutine gets the error at its await.
    before
        Called before each step. If it returns an awaitable, the step begins when that is done. A cancellation meanwhile
        reaches the coroutine when its step begins.
    """

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        if not is_coroutine_function(function):
            raise InvalidTypeError(f"the decorator takes a coroutine function, `async def`, not {function!r}")

        @functools.wraps(function)
        async def in_steps(*args: P.args, **kwargs: P.kwargs) -> T:
            state = enter()
            returned: T = await _run(_Steps(function(*args, **kwargs), state), before)
            return returned

        return in_steps

    return decorate


class _Steps:
    """The steps of one coroutine, each in the coroutine's own state of the thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], state: AbstractContextManager[object]) -> None:
        self._coroutine = coroutine
        self._state = state
        self._started = False

    def take(self, value: Any, error: BaseException | None) -> Any:
        """Send a value, or throw an error, into the coroutine; return what it awaits. Raise what the coroutine raises.

        An error of its state reaches the coroutine at its await. Before its first step it is closed instead.
        """
        try:
            while True:
                entered = suspended = False
                try:
                    with self._state:
                        entered = True
                        awaited = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
                        suspended = True
                    return awaited
                except BaseException as refused:
                    if entered and not suspended:
                        raise  # of the coroutine, which has ended
                    if not (entered or self._started):
                        self._coroutine.close()
                        raise
                    value, error = None, refused
                if not entered:
                    return self._coroutine.throw(error)
        finally:
            self._started = True
            value = error = None  # an exception that refers to itself by this frame stays until a garbage collection

    def close(self) -> None:
        """Close the coroutine, also if its state cannot be entered."""
        entered = False
        try:
            with self._state:
                entered = True
                self._coroutine.close()
        finally:
            if not entered:
                self._coroutine.close()


@types.coroutine
def _run(steps: _Steps, before: Callable[[], Awaitable[object] | None] | None) -> Generator[Any, Any, Any]:
    """Pass everything that the event loop sends or throws here on to the coroutine, step by step."""
    value: Any = None
    error: BaseException | None = None
    try:
        while True:
            try:
                if before is not None and (waiting := before()) is not None:
                    yield from waiting.__await__()
            except GeneratorExit:
                raise
            except BaseException as caught:  # noqa: BLE001 - the coroutine gets it
                value, error = None, caught
            try:
                awaited = steps.take(value, error)
            except StopIteration as stop:
                return stop.value
            value = error = None  # what they refer to must not live until the next step
            try:
                value = yield awaited
            except GeneratorExit:
                raise
            except BaseException as caught:  # noqa: BLE001 - the coroutine gets it
                error = caught
    except GeneratorExit:
        steps.close()
        raise
    finally:
        value = error = None
