"""The outcomes of a batch: one result or one exception for each request, and their delivery."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import CoroutineType
from typing import Any

from .._base._user_code import failure_of
from .._base._wakeups import Wakes
from ..completion import Operation
from ..coordination import Node
from ..errors import AiocudaError
from ..pipeline import PLAIN, ResultCopies
from ._errors import BatchError, copy_of
from ._requests import Request
from ._statistics import BatcherMeter

__all__ = ["Delivery", "failures", "is_failure", "outcomes", "own_outcomes"]

#: Results that are looked at in one iteration of the loop: 1 µs each.
AT_ONCE = 256


def is_failure(outcome: Any) -> bool:
    """True if an outcome is an exception. Its ``__class__`` does not count: a mock names the class of its ``spec``."""
    return issubclass(type(outcome), BaseException)


def outcomes(results: Any, size: int) -> list[Any]:
    """Return the results of a function as a list of results and exceptions.

    Raises
    ------
    BatchError
        It is no sequence, or has not one item for each request; or an item is an operation, a node or a coroutine.
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
        elif isinstance(result, (Operation, Node, CoroutineType, type)):
            if isinstance(result, type):
                if not issubclass(result, BaseException):
                    continue
                raise BatchError(
                    f"result {position} of the batch is the class {result.__name__}, and no exception: return an "
                    f"object of it, {result.__name__}(message)",
                    size=size,
                )
            raise BatchError(
                f"result {position} of the batch is {result!r}, and not its result: "
                "`return await aiocuda.gather(*operations)` inside the function",
                size=size,
            )
    return found


def failures(error: BaseException) -> Iterator[BaseException]:
    """Yield exceptions for the requests of a batch whose function has raised ``error``, an object for each."""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, StopIteration, StopAsyncIteration)):
        cause, error = error, BatchError(f"the function of the batch ended by {type(error).__name__}")
        error.__cause__ = cause
    while True:
        yield copy_of(error)


async def own_outcomes(results: Any, size: int, copies: ResultCopies) -> tuple[list[Any], int]:
    """Return the outcomes of a batch, and of how many of them a part was copied.

    An array with an item for each request is copied as a whole. A result that cannot be copied fails its request.

    Raises
    ------
    BatchError
        As `outcomes`; or a result has an array in the memory of a graph, inside of an object that is not copied.
    """
    if copies.is_array(results):
        is_shared = copies.find(results)
        if is_shared:
            await copies.make()
        return outcomes(copies.owned(results), size), size if is_shared else 0
    found = outcomes(results, size)
    shared = []
    for position, outcome in enumerate(found):
        if position % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        if type(outcome) in PLAIN or is_failure(outcome):
            continue
        try:
            if copies.find(outcome):
                shared.append(position)
        except Exception as error:  # noqa: BLE001 - the request gets it
            found[position] = _cannot_copy(error)
    copied = 0
    if shared:
        await copies.make()
        copied = await _replace(found, shared, copies)
    leak = await copies.leak([outcome for outcome in found if not is_failure(outcome)])
    if leak is not None:
        raise BatchError(leak)
    return found, copied


async def _replace(found: list[Any], positions: list[int], copies: ResultCopies) -> int:
    """Replace the outcomes at these positions by those with copies, and return how many have succeeded."""
    replaced = 0
    for number, position in enumerate(positions):
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        try:
            found[position] = copies.owned(found[position])
            replaced += 1
        except Exception as error:  # noqa: BLE001 - the request gets it
            found[position] = _cannot_copy(error)
    return replaced


def _cannot_copy(error: Exception) -> BatchError:
    """Return the error of a request with a result that cannot be copied."""
    failure = BatchError(str(error) if isinstance(error, AiocudaError) else f"a result cannot be copied: {error!r}")
    failure.__cause__ = error
    return failure


class Delivery:
    """Gives outcomes to requests: at most 256 waiters of the loop are woken in one iteration, see `Wakes`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, meter: BatcherMeter) -> None:
        self._loop = loop
        self._wakes = Wakes.of(loop)
        self._meter = meter
        self._pending: deque[tuple[deque[Request], Iterator[Any]]] = deque()  # some requests, and their outcomes

    def put(self, requests: Iterable[Request], outcomes: Iterable[Any], *, later: bool = False) -> None:
        """Set the outcome of each request: an exception, or a result. Requests that are done keep their outcome.

        Parameters
        ----------
        outcomes
            At least one for each request. Iterated when the outcomes are set.
        later
            Begin in the loop's next iteration, after the tasks that are ready now.
        """
        left = deque(requests)
        if not left:
            return
        self._pending.append((left, iter(outcomes)))
        if len(self._pending) > 1:
            return  # `_next` comes to them
        if later:
            self._loop.call_soon(self._wakes.wake, self._next)
        else:
            self._wakes.wake(self._next)

    def _next(self) -> bool:
        """Set the next outcome. Return whether there are more."""
        if self._pending:
            requests, outcomes = self._pending[0]
            request = requests.popleft()
            if not requests:
                self._pending.popleft()
            outcome = next(outcomes)
            if is_failure(outcome):
                if request.fail(outcome):
                    self._meter.failed += 1
            elif request.resolve(outcome):
                self._meter.answered += 1
        return bool(self._pending)

    def __len__(self) -> int:
        """The number of batches whose outcomes are not set."""
        return len(self._pending)

    async def drained(self) -> None:
        """Wait until all outcomes so far are set."""
        while self._pending:  # noqa: ASYNC110 - `Wakes` sets them in the next iterations
            await asyncio.sleep(0)
