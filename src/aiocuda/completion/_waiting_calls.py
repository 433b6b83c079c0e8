"""WaitingCalls: the calls of one driver that may wait for running kernels, and hold the launches of other threads.

`oldest_unfinished` finds what runs, from the reactors of the driver.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from .._base._label import shown
from .._base._log import log
from .._base._shared import copied
from .._core import INTERNAL
from ..driver.protocol import Driver

if TYPE_CHECKING:
    from .._core import StreamOperation
    from ._reactor import Reactor

__all__ = ["CURES", "LONG", "WaitingCall", "WaitingCalls", "oldest_unfinished", "reactors_of"]

T = TypeVar("T")

#: Seconds. A longer call has waited, or has held the launches of other threads for as long.
LONG: Final = 0.02

#: Running operations that are named.
MOST_NAMED: Final = 4

#: Long calls that are kept.
MOST_KEPT: Final = 64

#: What a program can do about each call, by the name of CUDA's function.
CURES: Final[Mapping[str, str]] = {
    "cuMemHostRegister": "lock host memory before the work begins, and keep it: device.pinned(...), device.pin(array)",
    "cuMemHostUnregister": "end `async with device.pin(array)` when no kernel runs, or copy through device.pinned(...)",
    "cuMemAllocManaged": "allocate unified memory before the work begins, and keep it",
    "cuMemFree": "keep unified memory, or free it when no kernel runs",
    "cuKernelGetFunction": "load kernels before the work begins, by `await device.load(kernel)`",
    "cuStreamCreateWithPriority": "pass open_device(streams_ahead=...) the number of streams that live at one time",
    "cuStreamDestroy": "keep streams, for example in a StreamPool, or close them when no kernel runs",
    "cuMemPoolTrimTo": "trim memory when no kernel runs",
    "cuCtxEnablePeerAccess": "copy between the two devices once before the work begins",
}


def reactors_of(driver: Driver) -> dict[weakref.ref[Reactor], None]:
    """Return the reactors of a driver, of all devices and loops, in the order in which they were made."""
    reactors: dict[weakref.ref[Reactor], None] = driver.registry.setdefault("reactors", {})
    return reactors


def oldest_unfinished(driver: Driver, most: int) -> list[StreamOperation[Any]]:
    """Return the oldest unfinished operation of each stream of a driver, for at most ``most`` streams. Any thread.

    An operation that waits on the host does not count. One that the device has finished counts until its loop has seen
    the end: no query is made.
    """
    found: list[StreamOperation[Any]] = []
    for known in list(reactors_of(driver)):
        reactor = known()
        for queue in () if reactor is None else list(reactor.queues):
            pending = copied(queue.pending)
            if pending:
                first = pending[0]
                if first.kind is INTERNAL:  # a chunk or a marker, which means nothing to a user
                    first = next((each for each in pending if each.kind is not INTERNAL), first)
                found.append(first)
            if len(found) == most:
                return found
    return found


class WaitingCall(NamedTuple):
    """A call that has taken longer than `LONG` while work was unfinished. Times are seconds of the driver's clock."""

    name: str
    start: float
    end: float
    running: str  #: the oldest unfinished operations of some streams


#: The kernel or the kind of an operation, its label, and the name of its stream.
_Facts: TypeAlias = tuple[str, str | None, str]

#: Called with a call that has waited, on its thread.
CallWatch: TypeAlias = Callable[[WaitingCall], object]


class WaitingCalls:
    """The calls of one driver that may wait for running kernels: those in progress, and those that have waited.

    Attributes
    ----------
    waited : int
        Calls that have taken longer than `LONG` while a device of the driver had unfinished work.
    """

    __slots__ = ("__weakref__", "_driver", "_in_progress", "_long", "_watches", "waited")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._in_progress: dict[object, tuple[str, float]] = {}  # the name and the start of each
        #: With the end, also if no work ran. A new tuple for each: other threads iterate the one that they have read.
        self._long: tuple[tuple[str, float, float], ...] = ()
        self._watches: tuple[CallWatch, ...] = ()
        self.waited = 0

    @classmethod
    def of(cls, driver: Driver) -> WaitingCalls:
        """Return the calls of a driver."""
        calls: WaitingCalls | None = driver.registry.get("waiting calls")
        return driver.registry.setdefault("waiting calls", cls(driver)) if calls is None else calls

    def run(self, name: str, call: Callable[..., T], *arguments: object) -> T:
        """Make a call of the driver, report it if it takes long, and return its result. Any thread.

        ``name`` is the name of CUDA's function, a key of `CURES`.
        """
        running = self._running()  # a call that waits ends when this work has ended
        start = self._driver.now()
        key = object()
        try:
            self._in_progress[key] = name, start
            return call(*arguments)
        finally:
            self._in_progress.pop(key, None)
            end = self._driver.now()
            if end - start > LONG:
                self._long = (*self._long[1 - MOST_KEPT :], (name, start, end))  # `longest` reads it
                self._note(name, start, end, running or self._running())

    def _running(self) -> list[_Facts]:
        """Return facts about the oldest unfinished operations, for the report of a call that turns out long.

        They are copies: an operation that a call in progress held would keep its result alive.
        """
        unfinished = oldest_unfinished(self._driver, MOST_NAMED)
        return [(each.kernel or each.kind, each.label, each.stream_name) for each in unfinished]

    def _note(self, name: str, start: float, end: float, running: Sequence[_Facts]) -> None:
        """Count, log and report a long call, if work was unfinished at its start or at its end."""
        if not running:
            return
        self.waited += 1
        call = WaitingCall(name, start, end, ", ".join(map(_described, running)))
        for watch in self._watches:
            watch(call)
        try:
            log(
                "warning", "driver_call_waited", call=name, seconds=round(end - start, 3), running=call.running,
                cure=CURES[name],
            )  # fmt: skip
        except Exception:  # noqa: BLE001 - a filter of the application has failed, on a thread without a loop
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def watch(self, watch: CallWatch) -> None:
        """Call ``watch(call)`` with each call that has waited, on its thread, until `unwatch`. It must not raise."""
        self._watches = (*self._watches, watch)

    def unwatch(self, watch: CallWatch) -> None:
        """End a `watch`. Does nothing if it has ended."""
        self._watches = tuple(each for each in self._watches if each != watch)

    def longest(self, start: float, end: float) -> str | None:
        """Return the name of the call that has taken more than half of the time between two times, or None."""
        # A call in progress counts until ``end``.
        calls = [*self._long, *((name, begun, end) for name, begun in list(self._in_progress.values()))]
        inside = [(min(ended, end) - max(begun, start), name) for name, begun, ended in calls]
        seconds, found = max(inside, default=(0.0, ""))
        return found if seconds > (end - start) / 2 else None


def _described(facts: _Facts) -> str:
    name, label, stream = facts
    return f"{name} {'' if label is None else shown(label) + ' '}on {stream}"
