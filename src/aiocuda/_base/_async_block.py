"""async_block: an asynchronous context manager whose other uses raise an error with the cure."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar, cast

from ._mistakes import refuses

__all__ = ["async_block"]

P = ParamSpec("P")
T = TypeVar("T")
Block: TypeAlias = "contextlib.AbstractAsyncContextManager[T, None]"


def async_block(cure: str) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, Block[T]]]:
    """Return a decorator as `contextlib.asynccontextmanager`. An entry by ``with``, and attributes, have the cure."""

    @refuses(__enter__=cure)
    class Asynchronous(contextlib._AsyncGeneratorContextManager[Any, Any]):
        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{self!r} has no {name!r}: it {cure}", name=name, obj=self)

        def __repr__(self) -> str:
            return f"{self.func.__qualname__}()"

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, Block[T]]:
        made_by: Any = function  # an asynchronous generator function, whatever its annotation is

        @functools.wraps(function)
        def made(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
            return cast("Block[T]", Asynchronous(made_by, args, kwargs))  # typed, it might suppress exceptions

        return made

    return decorate
