"""RequestLog: the batches and requests of the batchers of one device, while a timeline records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..completion import EndedRequest, StartedBatch
from ._recording import Batch, Request

__all__ = ["End", "RequestLog"]

#: What `RequestLog.begin` returns: a function that is called when the batch has ended.
End: TypeAlias = Callable[[Sequence[BaseException | None]], None]


class RequestLog:
    """Batches that began and ended, and requests that were submitted and ended, from `since` on.

    The hooks give durations, because the loop's clock is not the driver's: `clock` is read in the hook, and the times
    before it follow. uvloop counts milliseconds, so there these times are as coarse.

    Parameters
    ----------
    clock
        Returns the time of the driver's clock.
    since
        The time at which the recording begins.
    """

    def __init__(self, clock: Callable[[], float], since: float) -> None:
        self._clock = clock
        self._since = since
        self._is_open = True
        self._batches: list[Batch] = []
        self._requests: list[Request] = []

    def begin(self, batch: StartedBatch) -> End | None:
        """Note the begin of a batch. Return the function for its end."""
        if not self._is_open:
            return None
        began = self._clock()

        def end(errors: Sequence[BaseException | None]) -> None:
            if self._is_open:
                failed = sum(error is not None for error in errors)
                own = Batch(batch.batcher, batch.function, batch.number, began, self._clock(), batch.size, failed)
                self._batches.append(own)

        return end

    def add(self, request: EndedRequest) -> None:
        """Note a request that has its outcome."""
        now = self._clock()
        submitted = now - request.seconds
        if not self._is_open or submitted < self._since:
            return
        began = None if request.waited_s is None else submitted + request.waited_s
        self._requests.append(
            Request(
                request.batcher, request.function, request.number, submitted, began, now, request.outcome,
                request.batch, request.label,
            )
        )  # fmt: skip

    def close(self) -> None:
        """Record nothing more. Any thread may call it."""
        self._is_open = False

    def record(self) -> tuple[tuple[Batch, ...], tuple[Request, ...]]:
        """Return the batches and the requests so far. Any thread may call it."""
        return tuple(self._batches), tuple(self._requests)
