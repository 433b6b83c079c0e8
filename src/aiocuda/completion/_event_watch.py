"""EventWatch: watches CUDA events for the waits of one event loop on one device, which no opened device has.

It follows the rule of waits, see `_wait_rule`, as the reactor does for the streams of an opened device, and shares that
device's notifier tokens. A wait has one event, so there are no queues: nothing is submitted, skipped or staged here.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from typing import TYPE_CHECKING, Any

from .._base._log import log
from .._base._wakeups import MOST_PER_TURN, WATCHDOG_SECONDS, Wakes
from .._core import DONE, Lease, Watch
from ..driver.protocol import Driver
from ..errors import AiocudaError, BusyError, ClosedError, DeviceFault
from ._alarm import Alarm
from ._foreign_work import is_captured
from ._notifiers import WATCHES, ArmedNotifier, Budget, EventLeases, NotifierPool
from ._wait_rule import CompletionPolicy, first_poll, next_look
from ._waiting_calls import reactors_of
from ._waits import Wait, end_with_loop

if TYPE_CHECKING:
    from ._reactor import Reactor

__all__ = ["EventWait", "EventWatch"]

#: CUDA's handles of the legacy default stream.
_LEGACY = (0, 1)


class EventWait(Wait):
    """A wait for a CUDA event.

    Attributes
    ----------
    lease : Lease or None
        The event, until the wait is done.
    line : int
        The stream of the event: of two waits with an equal one, the older is done first.
    source : int
        CUDA's handle of the stream, or minus that of the event of another library.
    armed : ArmedNotifier or None
    notified : bool
        True if its notifier has come: what came before the event when the notifier was armed is done.
    """

    __slots__ = ("_release", "_watch", "armed", "lease", "line", "notified", "source")

    _looks_first = True

    def __init__(
        self, watch: EventWatch, keep: object, lease: Lease, release: Callable[[], object], source: int
    ) -> None:
        super().__init__(watch.loop, keep)
        self._watch = watch
        self._release = release
        self.lease: Lease | None = lease
        self.source = source
        self.line = source if source >= 0 else -self.id  # an event may be recorded again on another stream
        self.armed: ArmedNotifier | None = None
        self.notified = False

    def _begin(self) -> None:
        self._watch = self._watch.current()
        self._watch.attend(self)

    def _leave(self) -> None:
        self._watch.leave(self)

    def _look(self) -> None:
        self._watch.look(self)

    def arm(self, armed: ArmedNotifier | None) -> None:
        """Note the notifier that is armed for the event."""
        self.armed = armed

    def notify(self) -> None:
        """Note that the notifier has come."""
        self.armed, self.notified = None, True

    def _end(self, status: int, error: BaseException | None) -> None:
        super()._end(status, error)
        self._give_event()

    def _give_event(self) -> None:
        if self.lease is not None:
            self.lease = None
            self._release()

    def __del__(self) -> None:
        if hasattr(self, "lease"):
            with contextlib.suppress(AiocudaError):  # in a forked child, the driver has no events
                self._give_event()


class _Source:
    """The stream or event of a wait, which an armed notifier has in the place of a queue."""

    __slots__ = ("handle",)

    reactor = None
    name = "a stream of another library"
    watch = Watch()

    def __init__(self, handle: int) -> None:
        self.handle = handle


class EventWatch:
    """Watches the events of the waits of one loop on one device.

    Attributes
    ----------
    closed : bool
        It watches nothing any more; `current` returns its successor.
    """

    __slots__ = ("__weakref__", "_alarm", "_arms", "_budget", "_device", "_driver", "_end", "_give_back",
                 "_host", "_leases", "_lines", "_notifiers", "_policy", "_reported", "_spinning", "_wakes", "_watchdog",
                 "_watches", "closed", "loop")  # fmt: skip

    def __init__(self, driver: Driver, device: int, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.closed = False
        self._driver = driver
        self._device = device
        policy = CompletionPolicy.named("balanced")
        self._policy = policy if driver.polls_freely else policy.parking()
        self._budget = Budget.of(driver, device)
        self._leases: EventLeases = driver.registry.setdefault(("wait events", device), EventLeases(driver, device))
        self._lines: dict[int, list[EventWait]] = {}  # the waits that have a waiter, by stream, the oldest first
        self._watches: dict[int, Watch] = {}
        self._spinning = self._reported = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._wakes = Wakes.of(loop)
        self._end = end_with_loop(self)
        self._host = next((reactor for reactor in self._reactors() if reactor.admit(self)), None)
        if self._host is not None:
            self._notifiers = self._host.notifier_pool
            self._arms = True
        else:
            self._notifiers = NotifierPool.take(driver, device, _nothing)
            self._own()
        self._alarm = Alarm(loop, driver.now, self._alarmed, watches=self._arms)

    def _reactors(self) -> Iterator[Reactor]:
        """Yield the reactors of devices that are open here."""
        for known in list(reactors_of(self._driver)):
            reactor = known()
            if reactor is not None and reactor.loop is self.loop and reactor.device_state.device == self._device:
                yield reactor

    def _own(self) -> None:
        """Read the port of the notifiers."""
        # Also when it is collected with its loop. Notifiers are never destroyed: the next loop takes them over.
        self._give_back = weakref.finalize(self, self._notifiers.give, self._driver, self._budget.tokens)
        self._give_back.atexit = False
        descriptor = self._notifiers.port.fileno()
        self._arms = descriptor is not None
        try:
            if descriptor is not None:
                self.loop.add_reader(descriptor, self._on_port)
        except NotImplementedError:
            self._arms = False  # such a loop queries by its timers

    def join(self, reactor: Reactor) -> NotifierPool | None:
        """Let the reactor of a device that is being opened read the port, until `take_over`; None if it cannot."""
        if self.closed or self._host is not None or not self._arms:
            return None
        self._host = reactor
        self._give_back.detach()
        return self._notifiers

    def take_over(self) -> None:
        """Read the port again: the device has been closed."""
        self._host = None
        self._own()

    @classmethod
    def of(cls, driver: Driver, device: int, loop: asyncio.AbstractEventLoop) -> EventWatch:
        """Return the watch of the running loop on a device, which the first wait makes ready for use."""
        key = id(loop), id(driver), device
        watch = WATCHES.get(key)
        if watch is None or watch.loop is not loop or watch.closed:
            driver.device_open(device)
            watch = WATCHES[key] = cls(driver, device, loop)
        return watch

    def current(self) -> EventWatch:
        """Return this watch, or its successor: waits outlive the end of a loop's generators."""
        return self.of(self._driver, self._device, self.loop) if self.closed else self

    @property
    def is_used(self) -> bool:
        return bool(self._lines)

    # -- new waits -----------------------------------------------------------------------------------------------------

    def after_stream(self, handle: int, keep: object) -> EventWait:
        """Return a wait for all work that another library has enqueued on a stream so far, given CUDA's handle.

        Raises
        ------
        BusyError
            The stream is being captured into a graph.
        """
        driver, device = self._driver, self._device
        if handle in _LEGACY:
            key = "default stream of waits", device
            stream = driver.registry.get(key) or driver.registry.setdefault(key, driver.stream_default(device))
        else:
            stream = driver.stream_import(device, handle)
        try:
            if is_captured(driver, stream):
                raise BusyError(f"stream 0x{handle:x} is being captured into a graph: end that capture first")
            lease = self._leases.take()
            wait = EventWait(self, keep, lease, functools.partial(self._leases.give, lease), handle)
            driver.event_record(lease.handle, stream)
        finally:
            if handle not in _LEGACY:
                driver.stream_destroy(stream)  # only forgotten
        return wait

    def after_event(self, event: int, handle: int, keep: object) -> EventWait:
        """Return a wait for an event of another library, given the driver's handle and CUDA's.

        A notifier is armed at once, if one is free: then the wait ends in time, also if the event is recorded again.
        """
        forget = functools.partial(self._driver.event_destroy, event)
        wait = EventWait(self, keep, Lease(event, False, []), forget, -handle)
        self.look(wait)
        if wait.status < DONE:
            self._arm(wait)
            self._watch_again()
        return wait

    # -- the rule of waits ---------------------------------------------------------------------------------------------

    def attend(self, wait: EventWait) -> None:
        """Watch a wait: it has a waiter."""
        line = self._lines.setdefault(wait.line, [])
        bisect.insort(line, wait, key=_id_of)
        self._plan(wait.line)
        self._watch_again()

    def leave(self, wait: EventWait) -> None:
        """Watch a wait no longer. Does nothing if it is not watched."""
        line = self._lines.get(wait.line, [])
        if wait in line:
            line.remove(wait)
        if not line:
            self._lines.pop(wait.line, None)
            self._watches.pop(wait.line, None)

    def _plan(self, key: int) -> None:
        """Decide how to wait for the oldest wait of a stream."""
        wait, watch = self._lines[key][0], self._watches.setdefault(key, Watch())
        if watch.attended and watch.target == wait.id:
            return  # the wait goes on
        now = self._driver.now()
        watch.attended, watch.target, watch.since = True, wait.id, now
        watch.poll_until = first_poll(self._policy, now, None)
        watch.polling = now < watch.poll_until
        if watch.polling:
            self._spin_soon()
        else:
            self._park(key, now)

    def _park(self, key: int, now: float) -> None:
        """Wait for a notification of the oldest wait of a stream, and have the alarm query it in between."""
        wait, watch = self._lines[key][0], self._watches[key]
        watch.polling = False
        self._arm(wait)
        if wait.status < DONE:
            watch.armed, watch.looked = wait.armed, now
            watch.poll_from, _ = next_look(
                self._policy, watch, now, polls=False, held_up=False, waits=len(self._lines)
            )  # fmt: skip
            self._alarm.set(watch.poll_from, now)

    def _arm(self, wait: EventWait) -> None:
        """Arm a notifier for a wait, unless one is armed, or one that comes before is left."""
        tokens = self._budget.tokens
        if not self._arms or not tokens or wait.armed is not None or self._has_left(wait.source):
            return
        operation: Any = wait  # it has the attributes of an operation that a notifier needs
        queue: Any = _Source(wait.source)
        try:
            wait.arm(self._notifiers.arm(self._driver, queue, operation, tokens))
        except DeviceFault as fault:
            self._fail_all(fault)
        except AiocudaError as error:
            self._report("the driver refused a notifier; a timer queries in its place", error)

    def _report(self, message: str, error: AiocudaError) -> None:
        """Report the first refusal."""
        if self._reported:
            return
        self._reported = True
        self.loop.call_exception_handler({"message": f"aiocuda: {message}", "exception": error})

    def _has_left(self, source: int) -> bool:
        """Return whether a notifier is armed for another wait of a stream, or for one of an event that was given up.

        So waits that are given up behind a long kernel hold one notifier, however many there are.
        """
        for armed in self._notifiers.armed.values():
            if isinstance(armed.queue, _Source) and armed.queue.handle == source and not armed.is_settled:
                wait = armed.operation
                if source >= 0 or wait is None or wait.status >= DONE:
                    return True
        return False

    def _spin_soon(self) -> None:
        if not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin)

    def _spin(self) -> None:
        """Query each stream that is polled once; repeat in the next iteration of the loop while there are any."""
        self._spinning = False
        now = self._driver.now()
        self._look([key for key, watch in list(self._watches.items()) if watch.polling])
        for key, watch in list(self._watches.items()):
            if watch.polling and now >= watch.poll_until and key in self._lines:
                self._park(key, now)
        if any(watch.polling for watch in self._watches.values()):
            self._spin_soon()

    def _alarmed(self, now: float) -> None:
        """Query the streams that are due."""
        reached = max(now + self._alarm.early, self._alarm.reached)
        parked = [(key, watch) for key, watch in self._watches.items() if not watch.polling and key in self._lines]
        due = [key for key, watch in parked if watch.poll_from <= reached]
        following = min((watch.poll_from for _, watch in parked if watch.poll_from > reached), default=math.inf)
        if len(due) > MOST_PER_TURN:
            following = now
            del due[MOST_PER_TURN:]
        if following < math.inf:
            self._alarm.set(following, now)
        try:
            self._look(due)
        finally:  # Ctrl-C: the others are still queried
            for key in due:
                if key in self._lines and not self._watches[key].polling:
                    self._park(key, now)

    def _look(self, keys: Iterable[int]) -> None:
        """Query streams, the oldest wait of each first, and plan the next one."""
        left = MOST_PER_TURN
        with self._queries() as refusal:
            for key in keys:
                while left > 0 and key in self._lines and self._is_over(self._lines[key][0], refusal):
                    left -= 1
                if key in self._lines:
                    self._plan(key)

    def look(self, wait: EventWait) -> None:
        """End a wait if its work is done."""
        if wait.status < DONE:
            with self._queries() as refusal:
                self._is_over(wait, refusal)

    def _is_over(self, wait: EventWait, refusal: AiocudaError | None) -> bool:
        """Query the event of a wait, and end the wait if it is done or refused. Return whether it has ended."""
        driver, lease = self._driver, wait.lease
        assert lease is not None
        try:
            if refusal is not None:
                raise refusal.again()
            done = driver.event_query(lease.handle) or wait.notified
            if driver.fault is not None:  # although the event says that its work is done
                raise driver.fault.again()
        except DeviceFault as fault:
            self._finish(wait, fault)
            self._fail_all(fault)
        except AiocudaError as error:
            self._finish(wait, error)
        else:
            if done:
                if wait.armed is not None:
                    wait.armed.found_at = driver.now()
                self._finish(wait)
        return wait.status >= DONE

    @contextlib.contextmanager
    def _queries(self) -> Iterator[AiocudaError | None]:
        """Query where another library may be capturing a stream; with an error in its place, no query is possible."""
        refusal: AiocudaError | None = None
        try:
            self._driver.begin_queries()
        except AiocudaError as error:
            refusal = error
        try:
            yield refusal
        finally:
            if refusal is None:
                self._end_queries()

    def _end_queries(self) -> None:
        try:
            self._driver.end_queries()
        except DeviceFault as fault:
            self._fail_all(fault)
        except AiocudaError as error:
            self._report("the driver refused to restore the capture mode of this thread", error)

    def _finish(self, wait: EventWait, error: BaseException | None = None) -> None:
        self.leave(wait)
        wait.finish(error)

    # -- wake-ups ------------------------------------------------------------------------------------------------------

    def _on_port(self) -> None:
        """Handle the tags of notifiers."""
        if not self.closed:
            tags = self._notifiers.port.drain()
            self.heard([armed for tag in tags if (armed := self._notifiers.disarm(tag, self._budget.tokens))])

    def heard(self, notifiers: Iterable[ArmedNotifier]) -> None:
        """Query the streams of notifiers that have come."""
        keys: dict[int, None] = {}
        for armed in notifiers:
            if isinstance(armed.queue, _Source):
                keys[armed.queue.handle] = None  # also if its own wait was given up
            wait = armed.operation
            if isinstance(wait, EventWait) and wait.armed is armed:
                wait.notify()
                keys[wait.line] = None
        self._look(keys)
        now = self._driver.now()
        for key in keys:
            if key in self._lines and not self._watches[key].polling:
                self._park(key, now)

    def _watch_again(self) -> None:
        if self._watchdog is None and not self.closed:
            self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch, context=Context())

    def _watch(self) -> None:
        """Find a fault and late notifiers: this does not depend on notifications."""
        self._watchdog = None
        try:
            fault = self._driver.fault
            if fault is not None:
                self._fail_all(fault)
            elif self._lines:
                self.look(next(iter(self._lines.values()))[0])
            for armed in self._notifiers.tick(self._budget.tokens) if self._host is None else ():
                log("warning", "notification_lost", armed.context, stream=armed.queue.name, operation=armed.id)
        finally:
            if self._lines or (self._host is None and self._notifiers.armed):
                self._watch_again()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail_all(self, fault: DeviceFault) -> None:
        """Fail all waits that have a waiter. The others find the fault when they get one."""
        self._notifiers.silence(self._budget.tokens)
        self._fail(fault)

    def _fail(self, error: AiocudaError) -> None:
        waits = [wait for line in self._lines.values() for wait in line]
        for wait in waits:
            self._finish(wait, error.again())

    def close(self) -> None:
        """Give the notifiers back. The loop may be closed already."""
        if self.closed:
            return
        self.closed = True
        if not self.loop.is_closed():
            self._fail(ClosedError("the event loop is ending"))
            if self._watchdog is not None:
                self._watchdog.cancel()
            descriptor = self._notifiers.port.fileno()
            if self._host is None and descriptor is not None:
                with contextlib.suppress(NotImplementedError):
                    self.loop.remove_reader(descriptor)
        self._alarm.close()
        if self._host is not None:
            self._host.leave(self)
        else:
            self._give_back()


def _id_of(wait: EventWait) -> int:
    return wait.id


def _nothing() -> None:
    """Do nothing: a loop that cannot watch the port queries by its timers."""
