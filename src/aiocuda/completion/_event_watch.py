"""EventWatch: watches CUDA events for `aiocuda.wait`: the work of other libraries, on one device, in one event loop.

The device need not be open. If it is open in this loop, its reactor is the *host*: it shares its notifiers and reads
their port. The waits for one stream form a *line*, the oldest first, and only the oldest is queried. A wait for another
library's event has a line of its own. A line is *polled* or *parked* as a queue of the reactor is: `_reactor` has these
terms, `_wait_rule` the rule, and `_notifiers` explains the *tags* and the *tokens* of notifiers.
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
        The key of its line: of two waits with the same one, the older is done first.
    source : int
        CUDA's handle of the stream, or minus that of the event of another library.
    armed : ArmedNotifier or None
    notified : bool
        True if the tag of its notifier has come: the work is done, even if the event has been recorded again since.
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
        self._watch = self._watch.current()  # the first one may have closed
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
        if hasattr(self, "lease"):  # `__init__` has not raised
            with contextlib.suppress(AiocudaError):  # in a forked child, the driver has no events
                self._give_event()


class _Source:
    """The stream or event of a wait. An `ArmedNotifier` of this watch has one as its ``queue``."""

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
        self._lines: dict[int, list[EventWait]] = {}  # the waits that have a waiter, by line, the oldest first
        self._watches: dict[int, Watch] = {}  # how to wait for the first wait of each line
        self._spinning = self._reported = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._wakes = Wakes.of(loop)
        self._end = end_with_loop(self)  # held: its end calls `close`, unless a wait is pending
        self._host = next((reactor for reactor in self._reactors() if reactor.admit(self)), None)
        if self._host is not None:
            self._notifiers = self._host.notifier_pool
            self._arms = True  # notifiers wake this loop
        else:
            self._notifiers = NotifierPool.take(driver, device, _nothing)
            self._read_port()
        self._alarm = Alarm(loop, driver.now, self._alarmed, watches=self._arms)

    def _reactors(self) -> Iterator[Reactor]:
        """Yield the reactors of this loop for this device, which may have been opened several times."""
        for known in list(reactors_of(self._driver)):
            reactor = known()
            if reactor is not None and reactor.loop is self.loop and reactor.device_state.device == self._device:
                yield reactor

    def _read_port(self) -> None:
        """Have the loop read the port of the notifiers: this watch has no host. Arm none if the loop cannot read it."""
        # `close` calls it, or the collection of the watch with its loop. Notifiers are never destroyed: the next loop
        # takes them over.
        self._give_back = weakref.finalize(self, self._notifiers.give, self._driver, self._budget.tokens)
        self._give_back.atexit = False
        descriptor = self._notifiers.port.fileno()
        self._arms = descriptor is not None
        try:
            if descriptor is not None:
                self.loop.add_reader(descriptor, self._on_port)
        except NotImplementedError:
            self._arms = False  # without `add_reader`, timers query

    def join(self, reactor: Reactor) -> NotifierPool | None:
        """Make the reactor of a device that is being opened the host, until `take_over`. Return the notifiers for it.

        Return None if this watch has a host, or no notifiers that wake the loop.
        """
        if self.closed or self._host is not None or not self._arms:
            return None
        self._host = reactor
        self._give_back.detach()  # the reactor gives them back
        return self._notifiers

    def take_over(self) -> None:
        """Read the port again: the device has been closed."""
        self._host = None
        self._read_port()

    @classmethod
    def of(cls, driver: Driver, device: int, loop: asyncio.AbstractEventLoop) -> EventWatch:
        """Return the watch of the running loop for a device. If there is none, make the device ready, and a watch."""
        key = id(loop), id(driver), device
        watch = WATCHES.get(key)
        if watch is None or watch.loop is not loop or watch.closed:  # a new loop may have the id of a collected one
            driver.device_open(device)
            watch = WATCHES[key] = cls(driver, device, loop)
        return watch

    def current(self) -> EventWatch:
        """Return this watch; if it has been closed with the loop's generators, its successor."""
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
                driver.stream_destroy(stream)  # an imported stream is only forgotten, not destroyed
        return wait

    def after_event(self, event: int, handle: int, keep: object) -> EventWait:
        """Return a wait for an event of another library, given the driver's handle and CUDA's.

        A notifier is armed at once, if one is free: then the wait ends in time, also if the event is recorded again.
        """
        forget = functools.partial(self._driver.event_destroy, event)
        wait = EventWait(self, keep, Lease(event, False, []), forget, -handle)  # it is not in `EventLeases`
        self.look(wait)
        if wait.status < DONE:
            self._arm(wait)
            self._watch_again()
        return wait

    # -- the rule of waits ---------------------------------------------------------------------------------------------

    def attend(self, wait: EventWait) -> None:
        """Watch a wait: it has a waiter. Older waits of its line may get their waiters later."""
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
        """Poll or park a line for its oldest wait, unless that has begun. ``key`` is an `EventWait.line`."""
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
        """Arm a notifier for the oldest wait of a line. Until its tag comes, have the alarm query the wait."""
        wait, watch = self._lines[key][0], self._watches[key]
        watch.polling = False
        self._arm(wait)
        if wait.status < DONE:  # a fault of the device, found by `_arm`, ends it
            # ``polls``: no end is predicted. ``held_up``: this watch does not measure how late callbacks are.
            watch.armed, watch.looked = wait.armed, now
            watch.poll_from, _ = next_look(
                self._policy, watch, now, polls=False, held_up=False, waits=len(self._lines)
            )  # fmt: skip
            self._alarm.set(watch.poll_from, now)

    def _arm(self, wait: EventWait) -> None:
        """Arm a notifier for a wait, unless none is free, or one is armed whose tag will have the wait queried."""
        tokens = self._budget.tokens
        if not self._arms or not tokens or wait.armed is not None or self._has_armed(wait.source):
            return
        operation: Any = wait  # it has the attributes of an operation that a notifier needs
        queue: Any = _Source(wait.source)
        try:
            wait.arm(self._notifiers.arm(self._driver, queue, operation, tokens))
        except DeviceFault as fault:
            self._on_fault(fault)
        except AiocudaError as error:
            self._report("the driver refused a notifier; a timer queries in its place", error)

    def _report(self, message: str, error: AiocudaError) -> None:
        """Pass the first refusal of the driver to the loop's exception handler. The others are dropped."""
        if self._reported:
            return
        self._reported = True
        self.loop.call_exception_handler({"message": f"aiocuda: {message}", "exception": error})

    def _has_armed(self, source: int) -> bool:
        """Return whether an armed notifier of another wait serves a new wait for the same stream or event, too.

        For a stream, each does. For an event, only that of a wait that was given up: the event may have been recorded
        again. So however many waits are given up behind a long kernel, they hold one notifier.
        """
        for armed in self._notifiers.armed.values():
            if isinstance(armed.queue, _Source) and armed.queue.handle == source and not armed.is_settled:
                wait = armed.operation
                if source >= 0 or wait is None or wait.status >= DONE:
                    return True
        return False

    def _spin_soon(self) -> None:
        """Have the loop call `_spin` in its next turn, unless it will do so already."""
        if not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin)

    def _spin(self) -> None:
        """Query each polled line once, and park those that were polled for long enough. Repeat while any is polled."""
        self._spinning = False
        now = self._driver.now()
        self._look([key for key, watch in list(self._watches.items()) if watch.polling])
        for key, watch in list(self._watches.items()):
            if watch.polling and now >= watch.poll_until and key in self._lines:
                self._park(key, now)
        if any(watch.polling for watch in self._watches.values()):
            self._spin_soon()

    def _alarmed(self, now: float) -> None:
        """Query the parked lines that are due."""
        reached = max(now + self._alarm.early, self._alarm.reached)  # the alarm rings early on purpose
        parked = [(key, watch) for key, watch in self._watches.items() if not watch.polling and key in self._lines]
        due = [key for key, watch in parked if watch.poll_from <= reached]
        following = min((watch.poll_from for _, watch in parked if watch.poll_from > reached), default=math.inf)
        if len(due) > MOST_PER_TURN:
            following = now  # the others in the next turn
            del due[MOST_PER_TURN:]
        if following < math.inf:
            self._alarm.set(following, now)
        try:
            self._look(due)
        finally:  # after Ctrl-C, too: those that were not queried still need a next query
            for key in due:
                if key in self._lines and not self._watches[key].polling:
                    self._park(key, now)

    def _look(self, keys: Iterable[int]) -> None:
        """Query lines. End the waits that are done, the oldest of each line first; then plan for the new oldest one.

        At most `MOST_PER_TURN` waits end, of all lines together.
        """
        left = MOST_PER_TURN
        with self._queries() as refusal:
            for key in keys:
                while left > 0 and key in self._lines and self._end_if_done(self._lines[key][0], refusal):
                    left -= 1
                if key in self._lines:
                    self._plan(key)

    def look(self, wait: EventWait) -> None:
        """Query a wait: end it if its work is done, or by an error if the driver refuses the query or has faulted."""
        if wait.status < DONE:
            with self._queries() as refusal:
                self._end_if_done(wait, refusal)

    def _end_if_done(self, wait: EventWait, refusal: AiocudaError | None) -> bool:
        """Query the event of a wait; end the wait if the work is done, or by an error. Return whether it has ended.

        With a ``refusal`` no query is possible: the wait ends by that error.
        """
        driver, lease = self._driver, wait.lease
        assert lease is not None
        try:
            if refusal is not None:
                raise refusal.again()
            done = driver.event_query(lease.handle) or wait.notified
            if driver.fault is not None:  # then the wait fails, although its event may be done
                raise driver.fault.again()
        except DeviceFault as fault:
            self._finish(wait, fault)
            self._on_fault(fault)
        except AiocudaError as error:
            self._finish(wait, error)
        else:
            if done:
                if wait.armed is not None:
                    wait.armed.found_at = driver.now()  # its tag has still to come
                self._finish(wait)
        return wait.status >= DONE

    @contextlib.contextmanager
    def _queries(self) -> Iterator[AiocudaError | None]:
        """Let this thread query in the block, even while another library captures a stream.

        Yield None; or the error with which the driver has refused that: then no query is possible.
        """
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
        """Restore the capture mode of this thread. Raises nothing: the waits have their results."""
        try:
            self._driver.end_queries()
        except DeviceFault as fault:
            self._on_fault(fault)
        except AiocudaError as error:
            self._report("the driver refused to restore the capture mode of this thread", error)

    def _finish(self, wait: EventWait, error: BaseException | None = None) -> None:
        self.leave(wait)
        wait.finish(error)

    # -- wake-ups ------------------------------------------------------------------------------------------------------

    def _on_port(self) -> None:
        """Handle the tags of notifiers: this watch reads the port."""
        if not self.closed:
            tags = self._notifiers.port.drain()
            self.notified([armed for tag in tags if (armed := self._notifiers.disarm(tag, self._budget.tokens))])

    def notified(self, notifiers: Iterable[ArmedNotifier]) -> None:
        """Query the lines of notifiers whose tags have come. Called by `_on_port`, or by the host."""
        keys: dict[int, None] = {}
        for armed in notifiers:
            if isinstance(armed.queue, _Source):
                keys[armed.queue.handle] = None  # later waits of the stream rely on it: see `_has_armed`
            wait = armed.operation
            if isinstance(wait, EventWait) and wait.armed is armed:
                wait.notify()
                keys[wait.line] = None
        self._look(keys)
        now = self._driver.now()
        for key in keys:
            if key in self._lines and not self._watches[key].polling:
                self._park(key, now)  # with another notifier

    def _watch_again(self) -> None:
        """Set the timer of the watchdog, unless it is set."""
        if self._watchdog is None and not self.closed:
            self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch, context=Context())

    def _watch(self) -> None:
        """Find a fault and lost notifiers. Runs every 25 ms while a wait is watched or a notifier is armed."""
        self._watchdog = None
        try:
            fault = self._driver.fault
            if fault is not None:
                self._on_fault(fault)
            elif self._lines:
                self.look(next(iter(self._lines.values()))[0])  # one query finds a fault
            for armed in self._notifiers.tick(self._budget.tokens) if self._host is None else ():  # else the host does
                log("warning", "notification_lost", armed.context, stream=armed.queue.name, operation=armed.id)
        finally:
            if self._lines or (self._host is None and self._notifiers.armed):
                self._watch_again()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _on_fault(self, fault: DeviceFault) -> None:
        """Fail all watched waits, and give back the tokens of armed notifiers: after a fault no tag comes.

        A wait without a waiter is not watched. It finds the fault when it gets one.
        """
        self._notifiers.forget_armed(self._budget.tokens)
        self._fail_waits(fault)

    def _fail_waits(self, error: AiocudaError) -> None:
        """Fail all watched waits, each with an error of its own."""
        waits = [wait for line in self._lines.values() for wait in line]
        for wait in waits:
            self._finish(wait, error.again())

    def close(self) -> None:
        """Fail the watched waits, and give the notifiers back, or leave the host. The loop may be closed already."""
        if self.closed:
            return
        self.closed = True
        if not self.loop.is_closed():
            self._fail_waits(ClosedError("the event loop is ending"))
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
    """Do nothing, as the ``wake`` of a pool: if the loop cannot watch the port, no notifier is armed."""
