"""Delivery: gives outcomes to requests, a limited number of them in one iteration of the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from .._base._wakeups import Wakes
from ._request import Request
from ._results import is_failure
from ._statistics import BatcherMeter

__all__ = ["Delivery"]


class Delivery:
    """Gives outcomes to requests: at most 256 waiters of the loop are woken in one iteration, see `Wakes`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, meter: BatcherMeter) -> None:
        self._loop = loop
        self._wakes = Wakes.of(loop)
        self._meter = meter
        self._pending: deque[Iterator[tuple[Request, Any]]] = deque()

    def put(self, outcomes: Iterable[tuple[Request, Any]], *, later: bool = False) -> None:
        """Set the outcome of each request: an exception, or a result. Requests that are done keep their outcome.

        Parameters
        ----------
        outcomes
            Iterated when the outcomes are set.
        later
            Begin in the loop's next iteration, after the tasks that are ready now.
        """
        self._pending.append(iter(outcomes))
        if len(self._pending) > 1:
            return
        if later:
            self._loop.call_soon(self._wakes.wake, self._next)
        else:
            self._wakes.wake(self._next)

    def _next(self) -> bool:
        """Set the next outcome; False if there is none left."""
        while self._pending:
            for request, outcome in self._pending[0]:
                if is_failure(outcome):
                    if request.fail(outcome):
                        self._meter.fail()
                elif request.resolve(outcome):
                    self._meter.answer()
                return True
            self._pending.popleft()
        return False

    async def drained(self) -> None:
        """Wait until all outcomes so far are set."""
        while self._pending:  # noqa: ASYNC110 - `Wakes` sets them in the next iterations
            await asyncio.sleep(0)
