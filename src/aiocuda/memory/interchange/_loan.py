"""Loan: a stream that another library uses, for the duration of a block."""

from __future__ import annotations

from collections.abc import Callable

from ..._core import Ring

__all__ = ["Loan"]


class Loan:
    """An ``async with`` block that submits all operations that wait on the host, then yields CUDA's handle.

    See `aiocuda.Stream.lend`. It is a class because a loan per request is usual, and a generator takes 2 µs longer.

    Parameters
    ----------
    close
        Called at the end if the stream was closed while it was lent.
    """

    __slots__ = ("_close", "_queue")

    def __init__(self, queue: Ring, close: Callable[[Ring], object]) -> None:
        self._queue = queue
        self._close = close

    async def __aenter__(self) -> int:
        queue = self._queue
        queue.check()
        while queue.rare.host_queue.entries:
            await queue.rare.flush()  # again, if other tasks have enqueued operations during the flush
            queue.check()
        queue.rare.begin_loan()
        try:
            return queue.driver.stream_handle(queue.handle)
        except BaseException:
            queue.rare.end_loan()
            raise

    async def __aexit__(self, *exc: object) -> None:
        queue = self._queue
        queue.rare.end_loan()
        queue.check_loop()
        if queue.ended:
            self._close(queue)
            return
        fault = queue.driver.fault
        if fault is not None:  # then no driver call is made
            raise fault.again()
        queue.rare.refuse_captured()
        queue.submit_marker()  # later waits include the work of the other library
