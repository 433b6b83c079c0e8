"""Machine: a driver and an event loop that do nothing by themselves. Whoever searches says what happens next."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any

from aiocuda.testing._loop_base import LoopBase

__all__ = ["Machine", "Ring", "ScriptedLoop"]


class ScriptedLoop(LoopBase):
    """Callbacks wait in order until they are told to run, timers until they are told that their time has come."""

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

    def call_soon(  # type: ignore[override]  # as little of a signature as is needed
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
        self.violations.append(f"the loop was told: {context.get('message')}: {context.get('exception')!r}")

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def run(self, handle: asyncio.Handle) -> None:
        """A callback's turn has come."""
        if not handle.cancelled():
            self.inside(handle._run)

    def run_next(self) -> None:
        """The next callback."""
        self.run(self.ready.popleft())

    def inside(self, function: Callable[[], object]) -> None:
        """Do it as a callback of this loop."""
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


class Ring:
    """One ring of a notifier: what it waits for, and how far it has come."""

    __slots__ = ("event", "heard", "lost", "notifier", "posted", "tag")

    def __init__(self, notifier: int, event: tuple[int, int], tag: int) -> None:
        self.notifier = notifier
        self.event = event  # stream, number: what the event had recorded when the notifier was armed
        self.tag = tag
        self.posted = 0  # so many times
        self.lost = False
        self.heard = False


class Machine:
    """As much of a driver as the completion room needs.

    When a stream gets on with its work makes no difference before somebody asks, or a notification comes. So it is then
    that it may have got on: at each query that is a choice of ``choose``.
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
        self._bells_made = self._events_made = 0
        self.clock = 0.0
        self.registry: dict[Any, Any] = {}
        self.given: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.events: dict[int, tuple[int, int]] = {}
        self.rings: list[Ring] = []
        self.port: deque[Ring] = deque()
        self.wake: Callable[[], None] | None = None
        self.nudged = False
        self.deserted = False  # who watched has gone: no verb may be called
        self.on_query: Callable[[], None] | None = None

    def now(self) -> float:
        return self.clock

    # -- streams and events

    def open(self, stream: int) -> int:
        self.given[stream] = self.done[stream] = 0
        return stream

    def work(self, stream: int) -> None:
        self._enter("a submission")
        self.given[stream] += 1

    def event_create(self, device: int, timing: bool) -> int:
        self._enter("event_create")
        self._events_made += 1
        return self._events_made

    def event_record(self, event: int, stream: int) -> None:
        self._enter("event_record")
        self.events[event] = stream, self.given[stream]

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
        """Nobody captures."""

    def end_queries(self) -> None:
        """Nobody captures."""

    def stream_destroy(self, stream: int) -> None:
        if self.done[stream] < self.given[stream]:
            self._violations.append(f"stream {stream} was destroyed at work")

    def _enter(self, verb: str) -> None:
        if self.deserted:
            self._violations.append(f"{verb} after close")

    def forget(self) -> None:
        """Let go of whom it served: a port is immortal, since its rack has a finaliser for it."""
        self._choose, self.on_query, self.wake = int, None, None
        self.registry.clear()
        self.rings.clear()
        self.port.clear()

    # -- notification

    def open_port(self, wake: Callable[[], None]) -> Machine:
        assert self.wake is None
        self.wake = wake
        return self

    def close(self) -> None:
        """Of the port."""

    def fileno(self) -> int | None:
        return 99 if self._descriptor else None

    def drain(self) -> list[int]:
        self.nudged = False
        rings = list(self.port)
        self.port.clear()
        for ring in rings:
            ring.heard = True
        return [ring.tag for ring in rings]

    def device_count(self) -> int:
        return 1

    def notifier_limit(self, device: int) -> int:
        return self._notifiers

    def notifier(self, device: int, port: object) -> Notifier:
        self._enter("notifier")
        self._bells_made += 1
        return Notifier(self, self._bells_made - 1)

    def post(self, ring: Ring) -> None:
        """The notification comes, so that what it waited for has."""
        stream, number = ring.event
        self.done[stream] = max(self.done[stream], number)
        ring.posted += 1
        self.port.append(ring)
        if not self._descriptor and not self.nudged:
            self.nudged = True
            assert self.wake is not None
            self.wake()


class Notifier:
    """Contract: it is not rung between a ring and the drain of that ring's tag."""

    def __init__(self, machine: Machine, index: int) -> None:
        self._machine = machine
        self._index = index

    def ring(self, event: int, tag: int) -> None:
        machine = self._machine
        machine._enter("ring")
        if any(ring.notifier == self._index and not ring.heard for ring in machine.rings):
            machine._violations.append(f"notifier {self._index} was rung again before its tag was read")
        if any(ring.tag == tag for ring in machine.rings):
            machine._violations.append(f"tag {tag:#x} was given twice")
        machine.rings.append(Ring(self._index, machine.events[event], tag))
