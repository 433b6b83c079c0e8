"""Deadlines: fails the requests of a batcher whose deadline has passed, with one timer for all of them."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Iterator

from .._base._wakeups import Wakes
from ..errors import DeadlineError
from ._requests import Request, RequestQueue
from ._statistics import BatcherMeter

__all__ = ["Deadlines", "wait_cure"]

#: The number of ended requests that may stay in the order of the deadlines, whatever its length.
FEW_ENDED = 64


class Deadlines:
    """The requests with a deadline that have no outcome yet, and one timer for all of them.

    A timer for each would call its function for all requests of one deadline in the same iteration of the loop, which
    takes 15 µs each. This expires as many in one iteration as `Wakes` allows.

    Parameters
    ----------
    loop
        That of the batcher.
    queue
        Expired requests leave it.
    meter
        Counts them.
    context
        That of the timer.
    wait
        The seconds that a request waits for others.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, queue: RequestQueue, meter: BatcherMeter, context: contextvars.Context,
        wait: float,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._queue = queue
        self._meter = meter
        self._context = context
        self._wait = wait
        self._wakes = Wakes.of(loop)
        self._requests: dict[int, Request] = {}  # by id
        self._order: list[tuple[float, int]] = []  # a heap of deadlines and ids, also of requests that have ended
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # the time for which the timer is set, or up to which requests are being expired
        self._is_expiring = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request, at: float) -> None:
        """Expire a request at this time, unless it is removed before."""
        self._requests[request.id] = request
        heapq.heappush(self._order, (at, request.id))
        if not self._is_expiring and (self._timer is None or at < self._due):
            self._set_timer()

    def remove(self, request: Request) -> None:
        """Forget a request that has its outcome."""
        if self._requests.pop(request.id, None) is None:
            return
        if not self._requests:
            self._set_timer()
        elif len(self._order) > 2 * len(self._requests) + FEW_ENDED:
            self._order = [entry for entry in self._order if entry[1] in self._requests]
            heapq.heapify(self._order)

    def _set_timer(self) -> None:
        """Set the timer for the first deadline. A request that has ended since may have it, which costs one call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._requests:
            self._order.clear()
        if self._order:
            self._due = self._order[0][0]
            self._timer = self._loop.call_at(self._due, self._expire_due, context=self._context)

    def _expire_due(self) -> None:
        """Begin to expire the requests whose deadline has passed. A timer may be called a little before its time."""
        self._timer = None
        self._due = max(self._due, self._loop.time())
        self._is_expiring = True
        self._wakes.wake(self._expire_next)

    def _expire_next(self) -> bool:
        """Expire the first request, if its deadline has passed. Return whether those of others have."""
        if self._is_first_due():
            request = self._requests.pop(heapq.heappop(self._order)[1], None)
            if request is not None:
                self._expire(request)
            if self._is_first_due():
                return True
        self._is_expiring = False
        self._set_timer()
        return False

    def _expire(self, request: Request) -> None:
        """Fail a request whose deadline has passed."""
        cure = wait_cure(request.deadline, self._wait) if self._queue.remove(request) else ""
        deadline = request.deadline
        error = DeadlineError(
            f"the deadline of {deadline:.3g} s has passed{cure}", deadline_s=deadline, predicted_s=None
        )
        if request.fail(error, "expired"):
            self._meter.missed_deadlines += 1

    def _is_first_due(self) -> bool:
        return bool(self._order) and self._order[0][0] <= self._due


def wait_cure(deadline: float | None, wait: float) -> str:
    """Return what a `DeadlineError` adds if a request waits for others until its deadline, or longer."""
    if deadline is None or not 0 < deadline <= wait:
        return ""
    return f": a request waits up to {wait:g} s for others, choose a batch_wait_timeout_s below the deadlines"
