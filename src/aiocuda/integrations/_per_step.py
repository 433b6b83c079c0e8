"""`per_step`: runs each step of a coroutine in a state of its thread that no other coroutine sees."""

from __future__ import annotations

import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from .._checks import is_coroutine_function
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
        If leaving it raises, the coroutine gets the error at its await.
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
            return await _run(function(*args, **kwargs), state, before)

        return in_steps

    return decorate


@types.coroutine
def _run(
    coroutine: Coroutine[Any, Any, T],
    state: AbstractContextManager[object],
    before: Callable[[], Awaitable[object] | None] | None,
) -> Generator[Any, Any, T]:
    """Send and throw everything into the coroutine that the event loop sends or throws here, step by step."""
    value: Any = None
    error: BaseException | None = None
    try:
        while True:
            try:
                while before is not None and (waiting := before()) is not None:
                    yield from waiting.__await__()
            except GeneratorExit:
                raise
            except BaseException as caught:  # noqa: BLE001 - the coroutine gets it
                value, error = None, caught
            suspended = False
            try:
                with state:
                    awaited = coroutine.send(value) if error is None else coroutine.throw(error)
                    suspended = True
            except StopIteration as stop:
                returned: T = stop.value
                return returned
            except BaseException as refused:
                if not suspended:
                    raise
                value, error = None, refused
                continue
            try:
                value, error = (yield awaited), None
            except GeneratorExit:
                raise
            except BaseException as caught:  # noqa: BLE001 - the coroutine gets it
                value, error = None, caught
    except GeneratorExit:
        with state:
            coroutine.close()
        raise
    finally:
        error = None  # an exception that refers to itself through this frame stays until a garbage collection
