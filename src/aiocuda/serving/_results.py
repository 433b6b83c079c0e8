"""The outcomes of a batch: one result or one exception for each request."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from .._base._user_code import failure_of
from ._errors import BatchError, copy_of

__all__ = ["failures", "is_failure", "outcomes"]


def is_failure(outcome: Any) -> bool:
    """True if an outcome is an exception. Its ``__class__`` does not count: a mock names the class of its ``spec``."""
    return issubclass(type(outcome), BaseException)


def outcomes(results: Any, size: int) -> list[Any]:
    """Return the results of a function as a list of results and exceptions.

    Raises
    ------
    BatchError
        It is no sequence, or has not one item for each request.
    """
    cure = f"it has to return one result, or one exception, for each of the {size} items, in their order"
    try:
        count = None if isinstance(results, (str, bytes, Mapping, AbstractSet)) else len(results)
    except TypeError:
        count = None  # a generator, None, or an array without dimensions
    if count is None:
        if isinstance(results, Awaitable):
            cure = f"await it inside the function; {cure}"
        raise BatchError(f"the function of the batch returned an object of {type(results)}: {cure}", size=size)
    found = list(results) if count == size else []
    if len(found) != size:
        if count > size:
            cure += ". If the others are padding, return results[: batch.size]"
        raise BatchError(f"the function of the batch returned {count} results: {cure}", size=size)
    seen: set[int] = set()
    for position, result in enumerate(found):
        if is_failure(result):
            # An exception that the function returns several times is raised as several objects.
            found[position] = failure_of(copy_of(result) if id(result) in seen else result)
            seen.add(id(result))
    return found


def failures(error: BaseException) -> Iterator[BaseException]:
    """Yield exceptions for the requests of a batch whose function has raised ``error``, an object for each."""
    if isinstance(error, (CancelledError, GeneratorExit, StopIteration, StopAsyncIteration)):
        cause, error = error, BatchError(f"the function of the batch ended by {type(error).__name__}")
        error.__cause__ = cause
    while True:
        yield copy_of(error)
