"""DeviceStreams: opens and closes the streams of one device.

A stream that is closed is destroyed after its work. A stream that is left, by an exception or a cancellation, withdraws
what is still on the host, and is destroyed after what the device has accepted.
"""

from __future__ import annotations

import contextlib
import itertools
from asyncio import _get_running_loop
from collections.abc import Iterable, Sequence

from .._base._failure import Poison
from .._base._types import Priority
from .._core import ENDED, STAGING, Ring
from ..completion._device_state import DeviceState
from ..completion._stream_queue import new_queue
from ..errors import BusyError, ClosedError
from ..memory._allocator import DeviceMemory
from ._loop_state import LoopState, LoopStates

__all__ = ["DeviceStreams"]


class DeviceStreams:
    """The streams of one opened device, each by its queue: several `Stream` objects may share one queue.

    While the device is ``closing``, new streams take only what was accepted before. When it is ``closed``, it destroys
    all streams that are open.
    """

    __slots__ = ("_device_state", "_driver", "_loop_states", "_memory", "_numbers", "closed", "closing")

    def __init__(self, device_state: DeviceState, memory: DeviceMemory, loop_states: LoopStates) -> None:
        self._device_state = device_state
        self._driver = device_state.driver
        self._memory = memory
        self._loop_states = loop_states
        self._numbers = itertools.count()
        self.closing = self.closed = False

    def begin_close(self) -> None:
        """New streams take only what was accepted before: the device is being closed."""
        self.closing = True

    def mark_closed(self) -> None:
        """The device destroys all streams that are open, or leaves them."""
        self.closed = True

    def open(self, loop_state: LoopState, priority: Priority, name: str | None) -> Ring:
        """Create a stream. ``cuStreamCreateWithPriority``."""
        handle = self._device_state.make_stream(priority)
        queue = new_queue(loop_state.reactor, handle, name or f"stream-{next(self._numbers)}")
        loop_state.queues[queue] = None
        self._device_state.stream_opened(1)
        if self.closing:
            queue.rare.refuse(draining=True)
        return queue

    def open_names(self) -> list[str]:
        """Return the names of the open streams of all loops."""
        return [queue.name for loop_state in self._loop_states for queue in loop_state.queues if not queue.closed]

    @staticmethod
    def check_not_lent(queue: Ring) -> None:
        """Raise `BusyError` if the stream is lent: closing waits for its work, and the borrower may enqueue more."""
        if queue.rare.lent and queue.loop is _get_running_loop():
            raise BusyError(f"{queue.name} is lent: leave the `async with stream.lend()` block first")

    def refuse(self, queue: Ring) -> None:
        """Refuse new work."""
        if not queue.obstacles & ENDED:
            queue.check_loop()
            queue.rare.refuse()

    @staticmethod
    def refuse_but_accepted(queue: Ring) -> None:
        """Refuse new work. `let_in` opens the stream for work that its coordinator accepted earlier."""
        queue.rare.refuse(draining=True)

    @staticmethod
    def let_in(queue: Ring) -> bool:
        """Open a stream that refuses new work, if `refuse_but_accepted` has closed it. Return whether it was closed.

        Raises
        ------
        ClosedError
            The program has closed the stream.
        BusyError
            The program captures the stream: the work of a coordinator cannot be part of a graph.
        """
        if queue.recorded:
            raise BusyError(
                f"{queue.name} is being captured, and an operation of a coordinator cannot be part of a graph: call "
                "the stream's queue methods, or leave the `async with stream.capture()` block first"
            )
        was_closed = queue.closed
        if was_closed:
            queue.rare.let_in()
        return was_closed

    @staticmethod
    def handle_of(queue: Ring) -> int:
        """Return the driver's name of a stream."""
        return queue.handle

    def wait_for_event(self, queue: Ring, event: int) -> None:
        """Make later work of a stream wait, on the device, for an event of the driver. ``cuStreamWaitEvent``."""
        queue.note_wait()
        self._driver.stream_wait(queue.handle, event)

    @staticmethod
    async def settle(queue: Ring) -> None:
        """Wait until the device has finished with all operations so far. Their failures stay unread."""
        await queue.rare.settle()

    @staticmethod
    async def drain(streams: Sequence[Ring]) -> None:
        """Wait until the device has finished with all work of the streams, which refuse new work."""
        for queue in streams:
            while not queue.obstacles & ENDED and (queue.pending or queue.on_host):
                await queue.rare.settle()

    @staticmethod
    def raise_unseen(queues: Iterable[Ring]) -> None:
        """Raise the failure of an operation of these streams that no code of the program has seen."""
        for queue in queues:
            queue.rare.unseen.raise_it()

    def leave(self, queue: Ring) -> None:
        """Withdraw what is on the host, without waiting. The stream is destroyed after what the device has accepted.

        A stream that is lent is given back to the driver when the loan has ended and the borrower's work has passed.
        While its device is being closed, a stream is not destroyed here, because the device waits for its work.
        """
        if not queue.rare.draining:
            self.give_up(queue)

    def give_up(self, queue: Ring) -> None:
        """Leave a stream even if its device is being closed: the wait for its work was cancelled."""
        if not queue.obstacles & ENDED:
            queue.check_loop()
            self.end(queue)

    def end(self, queue: Ring) -> None:
        """Leave a stream that has not ended, on its loop."""
        queue.rare.finish()
        host_queue = queue.rare.host_queue
        if host_queue.entries or host_queue.followers:
            _withdraw(queue)
        if not queue.rare.lent:
            self._close_after_work(queue)

    def loan_ended(self, queue: Ring) -> None:
        """Destroy a stream that was closed, by itself or with its device, while it was lent."""
        if queue.rare.lent:
            return
        if not self.closed and self._loop_states.lists(queue):
            queue.submit_marker()  # the work that the borrower has enqueued is waited for, too
            self._close_after_work(queue)
        elif not self._loop_states.lists(queue) and self._driver.fault is None:
            with contextlib.suppress(ClosedError):  # the driver was closed with its device
                self._device_state.destroy_stream(queue.handle)

    def forget_dropped(self, loop_state: LoopState) -> None:
        """Forget idle imported streams that the program does not hold any more. Their owners destroy them."""
        for queue in tuple(loop_state.queues):
            if queue.rare.imported and queue.rare.stream is None and queue.idle:
                queue.rare.finish()
                self._give_back(queue)

    def destroy(self, queue: Ring) -> None:
        """Destroy a closed queue's stream. ``cuStreamDestroy``. After a fault the driver is not called.

        A stream that is lent is destroyed when the loan ends, so that the driver gives its handle to no other before.
        """
        if not queue.obstacles & ENDED:
            queue.rare.finish()
        if self._driver.fault is not None:
            return
        if not queue.rare.imported:
            self._device_state.stream_opened(-1)
        self._memory.release(queue)
        if not queue.rare.lent:
            self._device_state.destroy_stream(queue.handle)

    def _close_after_work(self, queue: Ring) -> None:
        """Destroy the stream when the device has finished its work. Until then its loop state watches it."""
        if not (queue.pending or queue.on_host):
            self._give_back(queue)
        elif self._driver.fault is None:  # after a fault the loop state keeps it, to wake its waiters
            last = queue.submit_marker()
            # Not while operations are being resolved: a stream may just have enqueued a wait for the device's end.
            last.on_settled = lambda: queue.loop.call_soon(self._close_after_work, queue)

    def _give_back(self, queue: Ring) -> None:
        if not self.closed and self._loop_states.forget(queue):  # else the device destroys it, or has done so
            queue.reactor.retire(queue)
            self.destroy(queue)


def _withdraw(queue: Ring) -> None:
    """Abandon the operations that are still on the host; operations of other streams that wait for them are skipped.

    A download that has begun keeps its place until no thread writes its array any more.
    """
    host_queue = queue.rare.host_queue
    if not host_queue.entries:
        host_queue.followers = {}
        return
    if not queue.pending:
        queue.submit_marker()  # so that they pass after the allocations that were made for them
    followers = [each for each in host_queue.followers if each.on_host]  # others were left, too
    host_queue.followers = {}
    withdrawn = list(host_queue.entries)
    landings = [operation.copy_out if operation.status == STAGING else None for operation in withdrawn]
    queue.rare.withdraw_all()
    if not withdrawn:  # the marker's submission has let them go to the device
        return
    error = ClosedError(f"{queue.name} was left by an exception while this was still on the host")
    poison = Poison(error, queue.loop, repr(withdrawn[0]))
    poison.reported = not followers  # the code that leaves knows of the failure; waiters in other streams may not
    failure = poison.failure()
    for operation, land in zip(withdrawn, landings, strict=True):
        operation.failure = failure
        if land is not None:
            operation.copy_out = land
            if not operation.detached:
                operation.detached = True
                queue.append(operation)
    for follower in followers:
        follower.rare.host_queue.pump()
        follower.attend()
