"""async_block: an asynchronous context manager whose other uses raise an error with the cure."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

from ._mistakes import refuses

__all__ = ["async_block"]

P = ParamSpec("P")
T = TypeVar("T")
Block: TypeAlias = "contextlib.AbstractAsyncContextManager[T, None]"


def async_block(call: str, cure: str) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, Block[T]]]:
    """Return a decorator as `contextlib.asynccontextmanager`. Uses without ``async with`` raise an error.

    Parameters
    ----------
    call
        The call as a program writes it, such as ``"ring.slot()"``.
    cure
        The rest of the sentence in the error.
    """

    @refuses(__await__=cure, __enter__=cure)
    class Asynchronous:
        __slots__ = ("_block",)

        def __init__(self, block: Block[Any]) -> None:
            self._block = block

        def __aenter__(self) -> Coroutine[Any, Any, Any]:
            return self._block.__aenter__()

        def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> Coroutine[Any, Any, None]:
            return self._block.__aexit__(kind, error, traceback)

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{call} has no {name!r}: it {cure}", name=name, obj=self)

        def __repr__(self) -> str:
            return call

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, Block[T]]:
        make = contextlib.asynccontextmanager(function)

        @functools.wraps(function)
        def made(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
            return Asynchronous(make(*args, **kwargs))  # type: ignore[arg-type]  # it suppresses no exception

        return made

    return decorate
