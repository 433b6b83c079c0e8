"""A driver and an event loop that do nothing by themselves: the search decides what happens next."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any

from aiocuda.testing._loop_base import LoopBase

__all__ = ["Notification", "ScriptedDriver", "ScriptedLoop"]


class ScriptedLoop(LoopBase):
    """An event loop that runs callbacks and timers only when the search chooses them; callbacks keep their order."""

    def __init__(self, violations: list[str], now: Callable[[], float]) -> None:
        super().__init__()
        self._debug = False
        self.violations = violations
        self.now = now
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[asyncio.TimerHandle] = []
        self.reader: asyncio.Handle | None = None

    def time(self) -> float:
        return self.now()

    def is_running(self) -> bool:
        return not self._closed

    def call_soon(  # type: ignore[override]  # a shorter signature is enough
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._check_closed()
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]  # the same
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]  # the same
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        timer = asyncio.TimerHandle(self.now() + delay, callback, args, self, context)
        self.timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle in self.timers:
            self.timers.remove(handle)

    def add_reader(self, fd: object, callback: Any, *args: Any) -> None:  # type: ignore[override]  # the same
        self.reader = asyncio.Handle(callback, args, self)

    def remove_reader(self, fd: object) -> bool:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.cancel()
        return reader is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.violations.append(
            f"the exception handler was called: {context.get('message')}: {context.get('exception')!r}"
        )

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def run(self, handle: asyncio.Handle) -> None:
        """Run a callback, unless it is cancelled."""
        if not handle.cancelled():
            self.inside(handle._run)

    def run_next(self) -> None:
        """Run the next callback."""
        self.run(self.ready.popleft())

    def inside(self, function: Callable[[], object]) -> None:
        """Call ``function`` as a callback of this loop."""
        asyncio._set_running_loop(self)
        try:
            function()
        finally:
            asyncio._set_running_loop(None)

    def close(self) -> None:
        self._closed = True
        self.ready.clear()
        self.timers.clear()
        self.reader = None


class Notification:
    """One use of a notifier: the event that it waits for, and its progress."""

    __slots__ = ("drained", "event", "lost", "notifier", "posted", "tag")

    def __init__(self, notifier: int, event: tuple[int, int], tag: int) -> None:
        self.notifier = notifier
        self.event = event  # (stream, number): what the event had recorded when the notifier was armed
        self.tag = tag
        self.posted = 0  # how many times
        self.lost = False
        self.drained = False


class ScriptedDriver:
    """The part of a driver that the completion package needs.

    The progress of a stream is visible only in a query or a notification. So a stream makes progress only there: each
    query asks ``choose`` whether the work is done.
    """

    polls_freely = True
    fault = None

    def __init__(
        self, choose: Callable[[int], int], violations: list[str], *, notifiers: int, descriptor: bool
    ) -> None:
        self._choose = choose
        self._violations = violations
        self._notifiers = notifiers
        self._descriptor = descriptor
        self._notifiers_made = self._events_made = 0
        self.clock = 0.0
        self.registry: dict[Any, Any] = {}
        self.submitted: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.events: dict[int, tuple[int, int]] = {}
        self.notifications: list[Notification] = []
        self.port: deque[Notification] = deque()
        self.wake: Callable[[], None] | None = None
        self.wake_pending = False
        self.device_closed = False  # then no driver call is allowed
        self.on_query: Callable[[], None] | None = None

    def now(self) -> float:
        return self.clock

    # -- streams and events

    def open(self, stream: int) -> int:
        self.submitted[stream] = self.done[stream] = 0
        return stream

    def work(self, stream: int) -> None:
        self._enter("a submission")
        self.submitted[stream] += 1

    def event_create(self, device: int, timing: bool) -> int:
        self._enter("event_create")
        self._events_made += 1
        return self._events_made

    def event_record(self, event: int, stream: int) -> None:
        self._enter("event_record")
        self.events[event] = stream, self.submitted[stream]

    def recorder(self, stream: int) -> Callable[[int], None]:
        return lambda event: self.event_record(event, stream)

    def event_query(self, event: int) -> bool:
        self._enter("event_query")
        if self.on_query is not None:
            self.on_query()
        stream, number = self.events[event]
        if self.done[stream] < number and self._choose(2):
            self.done[stream] = number
        return self.done[stream] >= number

    def begin_queries(self) -> None:
        """Do nothing: no stream is captured."""

    def end_queries(self) -> None:
        """Do nothing: no stream is captured."""

    def stream_destroy(self, stream: int) -> None:
        if self.done[stream] < self.submitted[stream]:
            self._violations.append(f"stream {stream} was destroyed before its work was done")

    def _enter(self, verb: str) -> None:
        if self.device_closed:
            self._violations.append(f"{verb} after close")

    def forget(self) -> None:
        """Drop all references. The port lives until the process ends: its notifier pool has a finaliser for it."""
        self._choose, self.on_query, self.wake = int, None, None
        self.registry.clear()
        self.notifications.clear()
        self.port.clear()

    # -- notifications

    def open_port(self, wake: Callable[[], None]) -> ScriptedDriver:
        assert self.wake is None
        self.wake = wake
        return self

    def close(self) -> None:
        """Close the port: nothing to do."""

    def fileno(self) -> int | None:
        return 99 if self._descriptor else None

    def drain(self) -> list[int]:
        self.wake_pending = False
        notifications = list(self.port)
        self.port.clear()
        for notification in notifications:
            notification.drained = True
        return [notification.tag for notification in notifications]

    def device_count(self) -> int:
        return 1

    def notifier_limit(self, device: int) -> int:
        return self._notifiers

    def notifier(self, device: int, port: object) -> Notifier:
        self._enter("notifier")
        self._notifiers_made += 1
        return Notifier(self, self._notifiers_made - 1)

    def post(self, notification: Notification) -> None:
        """Deliver a notification. The stream has then reached its event."""
        stream, number = notification.event
        self.done[stream] = max(self.done[stream], number)
        notification.posted += 1
        self.port.append(notification)
        if not self._descriptor and not self.wake_pending:
            self.wake_pending = True
            assert self.wake is not None
            self.wake()


class Notifier:
    """A notifier. Its contract: it is not armed again before the tag of its last notification has been read."""

    def __init__(self, driver: ScriptedDriver, index: int) -> None:
        self._driver = driver
        self._index = index

    def ring(self, event: int, tag: int) -> None:
        driver = self._driver
        driver._enter("ring")
        if any(
            notification.notifier == self._index and not notification.drained for notification in driver.notifications
        ):
            driver._violations.append(f"notifier {self._index} was armed again before its tag was read")
        if any(notification.tag == tag for notification in driver.notifications):
            driver._violations.append(f"tag {tag:#x} was used twice")
        driver.notifications.append(Notification(self._index, driver.events[event], tag))
