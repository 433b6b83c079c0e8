"""Regions: ranges of host memory that a worker thread page-locks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._base._failure import Failure, raisable
from .._base._wakeups import Wakes
from ..completion._waiting_calls import WaitingCalls

if TYPE_CHECKING:
    from .._core import Operation, Ring
    from ..completion._reactor import Reactor
    from ..driver.protocol import Driver

__all__ = ["PinGate", "Region"]


class Region:
    """A range of host memory that is page-locked, or will be.

    Attributes
    ----------
    memory
        The object that holds the memory.
    address, nbytes
        The first byte, and the size.
    locked
        True while the memory is page-locked.
    error
        The error of a lock that failed; else None.
    """

    __slots__ = ("_callbacks", "address", "error", "locked", "memory", "nbytes")

    def __init__(self, memory: Any, address: int, nbytes: int) -> None:
        self.memory = memory
        self.address = address
        self.nbytes = nbytes
        self.locked = False
        self.error: BaseException | None = None
        self._callbacks: list[tuple[Callable[[], object], asyncio.AbstractEventLoop | None]] = []

    def pin(self, reactor: Reactor) -> None:
        """Page-lock the memory on a worker thread. ``cuMemHostRegister``."""
        driver = reactor.device_state.driver
        reactor.jobs.start(lambda: self.lock(driver), _ignore)

    def lock(self, driver: Driver) -> None:
        """Page-lock the memory, then notify all waiters. On a worker thread: the loop may have been closed."""
        try:
            WaitingCalls.of(driver).run("cuMemHostRegister", driver.pin, self.address, self.nbytes)
        except BaseException as error:
            self.error = raisable(error)
            raise
        else:
            self.locked = True
        finally:
            self._notify()

    def unlock(self, driver: Driver) -> None:
        """End the lock, if the memory is locked. **May block**."""
        if self.locked:
            self.locked = False
            WaitingCalls.of(driver).run("cuMemHostUnregister", driver.unpin, self.address)

    def when_locked(self, callback: Callable[[], object], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Call a function when the memory is locked or the lock has failed: on ``loop``, or on any thread if None."""
        if not self._settled:
            self._callbacks.append((callback, loop))
            if self._settled:  # since the test above; `_notify` runs each callback once, on whichever thread
                self._notify()
        else:
            callback()

    @property
    def _settled(self) -> bool:
        return self.locked or self.error is not None

    def _notify(self) -> None:
        """Run the callbacks, in the order in which they were added."""
        taken = []
        while self._callbacks:
            try:
                taken.append(self._callbacks.pop())  # two threads may be here: each callback is taken by one of them
            except IndexError:
                break
        loops: dict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = {}
        for callback, loop in reversed(taken):
            if loop is None:
                callback()
            else:
                loops.setdefault(loop, []).append(callback)
        for loop, callbacks in loops.items():
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_run_on_loop, loop, callbacks)


def _run_on_loop(loop: asyncio.AbstractEventLoop, callbacks: list[Callable[[], object]]) -> None:
    """Run callbacks on their loop, a few in each iteration."""
    callbacks.reverse()

    def run_next() -> bool:
        if callbacks:  # none is left if Ctrl-C came in the last one
            callbacks.pop()()
        return bool(callbacks)

    Wakes.of(loop).wake(run_next)


def _ignore(result: object, error: BaseException | None) -> None:
    """Ignore the result of `Region.lock`: the thread has notified the waiters."""


class PinGate:
    """Holds operations of one queue on the host until a region is page-locked."""

    __slots__ = ("_queue", "_region", "_registered")

    def __init__(self, region: Region, queue: Ring) -> None:
        self._region = region
        self._queue = queue
        self._registered = False

    def ready(self, operation: Operation[Any]) -> bool:
        """True once the region is locked; raise the error if it could not be locked."""
        region = self._region
        if not self._registered and not region.locked:
            self._registered = True
            region.when_locked(self._pump, self._queue.loop)
        if region.error is not None:
            raise raisable(region.error)
        return region.locked

    def _pump(self) -> None:
        """Submit the operations that waited."""
        self._queue.rare.host_queue.pump()
        self._queue.attend()

    def failure(self) -> Failure | None:
        """Return None: a lock that failed is raised by `ready`."""
        return None
