"""Reactor: watches the stream queues of one event loop on one device.

It has one poller, one port, one alarm and one watchdog, for any number of streams and waiters. Each queue with a waiter
has a plan: poll between two moments, sleep before, park after. An operation is resolved only after a query.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Self

from .._base._log import log
from .._base._loop_watch import LoopWatch
from .._base._mistakes import add_reader
from .._base._user_code import LEAVES_LOOP
from .._base._wakeups import MOST_PER_TURN, WATCHDOG_SECONDS, Wakes
from .._core import LANDING, ReactorFields
from ..driver.protocol import Driver
from ..errors import AiocudaError, DeviceFault
from ._alarm import Alarm
from ._device_state import DeviceState
from ._jobs import JOB, Jobs
from ._notifiers import NotifierPool
from ._pumps import Pumps
from ._submission_pace import SubmissionPace

if TYPE_CHECKING:
    from ._stream_operation import StreamOperation
    from ._stream_queue import StreamQueue

__all__ = ["QueryGuard", "Reactor", "reactors_of"]

#: Streams per pass of the watchdog, in turn. A query of any stream finds a fault of the device.
MOST_PER_WATCH = 32

#: A stream without a notifier is queried this often, at most.
TICK_SECONDS = 0.001

#: The more such streams there are, the more rarely each is queried: a query takes 1.5 to 5 µs, so that all of them take
#: at most 2 % of a core. (Queried every millisecond, 232 idle streams took 30 %.)
TICK_SECONDS_PER_QUEUE = 250e-6

#: No stream is queried later than by this part of the time that it has waited.
TICK_LATENESS = 1 / 32

#: A parked queue is queried once more after this time, at the earliest.
RECHECK_SECONDS = 0.001

#: A sleep longer than this is parked too, in case the work ends earlier than predicted.
LONG_SLEEP = 0.005


class QueryGuard:
    """A context manager around a pass of queries, where another library may be capturing a stream.

    Attributes
    ----------
    open : bool
        True between the driver's ``begin_queries`` and ``end_queries``.
    """

    __slots__ = ("_depth", "_device_state", "_reactor", "open")

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._device_state = reactor.device_state
        self._depth = 0
        self.open = False

    def __enter__(self) -> Self:
        if self._device_state.guarded and not self.open:
            try:
                self._device_state.driver.begin_queries()
                self.open = True
            except DeviceFault:
                pass  # the driver repeats it at the first query of the pass
            except AiocudaError as error:
                self._reactor.report_refusal(error)  # this pass makes no query
        self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self.open and not self._depth:
            self.open = False
            self._device_state.driver.end_queries()


def reactors_of(driver: Driver) -> dict[weakref.ref[Reactor], None]:
    """Return the reactors of a driver, of all devices and loops, in the order in which they were made."""
    reactors: dict[weakref.ref[Reactor], None] = driver.registry.setdefault("reactors", {})
    return reactors


class Reactor(ReactorFields):
    """Resolves the operations of one loop on one device.

    Attributes
    ----------
    closed : bool
        The reactor watches nothing any more.
    queues : dict of StreamQueue
        The queues with unfinished operations.
    opened : dict of StreamQueue
        All queues that are not closed.
    query_guard : QueryGuard
    wakes : Wakes
    pumps : Pumps or None
        Made when streams wait for each other on the host.
    notifier_pool : NotifierPool
    jobs : Jobs
    alarm : Alarm
    sweeps : tuple of callables
        Called in each pass of the watchdog. Finalisers leave their memory to them.
    """

    #: The names of the counters.
    COUNTS = (
        *("submitted", "resolved", "failed", "abandoned", "polls", "sleeps", "parks"),
        *("notifications", "watchdog_wakes", "lost_wakes"),
    )

    __slots__ = ("__weakref__", "_complained", "_descriptor", "_loop_watch", "_spinning", "_tags", "_tick", "_tick_at",
                 "_ticked", "_watchdog", "abandoned", "alarm", "closed", "failed", "jobs", "lost_wakes",
                 "notifications", "notifier_pool", "opened", "parks", "pumps", "query_guard", "queues", "sleeps",
                 "submission_pace", "submitted", "sweeps", "wakes", "watchdog_wakes")  # fmt: skip

    def __init__(self, device_state: DeviceState, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(device_state, loop)
        self.closed = False
        self.query_guard = QueryGuard(self)
        # Dictionaries instead of sets: a simulation visits their keys in the same order in every process.
        self.queues: dict[StreamQueue, None] = {}
        self._ticked: dict[StreamQueue, float] = {}  # parked without a notifier: the time of the next query
        self._tags: list[int] = []  # that have come and were not handled yet; the oldest is the last
        self._spinning = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = math.inf  # the time of the timer, by the driver's clock
        # A simulated loop does not run in real time.
        self._loop_watch = LoopWatch.of(loop) if device_state.driver.now is time.monotonic else None
        self.submission_pace = SubmissionPace(loop)
        self.wakes = Wakes.of(loop)
        self.pumps: Pumps | None = None
        self._complained = False
        self.sweeps: tuple[Callable[[], object], ...] = ()
        self.opened: dict[StreamQueue, None] = {}
        self.submitted = self.failed = self.abandoned = 0
        self.sleeps = self.parks = self.notifications = self.watchdog_wakes = self.lost_wakes = 0
        self.notifier_pool = NotifierPool.take(device_state.driver, device_state.device, self._wake_from_thread)
        self.jobs = Jobs(device_state.driver, self.notifier_pool.port)
        reactors = reactors_of(device_state.driver)
        reactors[weakref.ref(self, reactors.pop)] = None
        descriptor = self._descriptor = self.notifier_pool.port.fileno()
        if descriptor is not None:
            try:
                add_reader(loop, descriptor, self._on_port)
            except BaseException:
                self.notifier_pool.give(device_state.driver, device_state.tokens)
                raise
        else:
            loop.call_soon(self._on_port)  # handles tags for the loop that had this port before
        self.alarm = Alarm(loop, device_state.driver.now, self._alarmed, watches=descriptor is not None)

    # -- the queues ----------------------------------------------------------------------------------------------

    def add(self, queue: StreamQueue) -> None:
        """Count the operations of a new queue."""
        self.opened[queue] = None

    def activate(self, queue: StreamQueue) -> None:
        """Watch a queue with unfinished operations. The watchdog deactivates it when it is idle."""
        queue.set_active(True)
        self.queues[queue] = None
        self.device_state.look_for_others()
        self.watch_again()

    def deactivate(self, queue: StreamQueue) -> None:
        """Stop watching an idle queue."""
        queue.set_active(False)
        self.queues.pop(queue, None)
        self.stop_attending(queue)

    def stop_attending(self, queue: StreamQueue) -> None:
        """Drop the plan of a queue: none of its operations has a waiter any more."""
        self.attended.pop(queue, None)
        self._ticked.pop(queue, None)
        queue.watch.attended = queue.watch.polling = False

    def retire(self, queue: StreamQueue) -> None:
        """Stop watching a closed queue. Its number of operations stays in the totals of the reactor."""
        if queue in self.opened:
            del self.opened[queue]
            self.submitted += queue.enqueued
        self.deactivate(queue)

    def counts(self) -> list[int]:
        """Return the counters, in the order of `COUNTS`."""
        counts = [getattr(self, name) for name in self.COUNTS]
        counts[0] += sum(queue.enqueued for queue in tuple(self.opened))
        return counts

    def inline(self, queue: StreamQueue) -> int:
        """Poll for an await that begins. All awaits of one turn together resolve at most `MOST_PER_TURN` operations."""
        left = MOST_PER_TURN - self.turn.inlined
        if left <= 0:
            return 0
        resolved = queue.poll(left)
        if resolved:
            self.turn.has_inlined(resolved)
        return resolved

    # -- poll, sleep, park ---------------------------------------------------------------------------------------

    def plan(self, queue: StreamQueue) -> None:
        """Decide how to watch the queue: when an operation gets a waiter, or after a change."""
        if self.closed:
            return
        operation, expected, spread = queue.awaited()
        if operation is None or operation.status == LANDING:
            self.stop_attending(queue)  # the end of a copy-out comes through `StreamQueue.copied_out`
            return
        self.attended[queue] = None
        queue.watch.attended = True
        now = queue.watch.since = self.device_state.driver.now()
        queue.watch.predicted = expected or 0.0
        queue.watch.poll_from, queue.watch.poll_until = self.device_state.policy.plan(now, expected, spread)
        self._ticked.pop(queue, None)
        if queue.watch.poll_from <= now:
            if now < queue.watch.poll_until:
                queue.watch.polling = True
                self._spin_soon()
            else:
                queue.watch.polling = False
                self._park(queue, operation)
        else:
            queue.watch.polling = False
            self.sleeps += 1
            if queue.watch.poll_from - now > LONG_SLEEP:
                self._arm(queue, operation)
            self.alarm.set(queue.watch.poll_from, now)

    def _spin_soon(self) -> None:
        if not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin)

    def _alarmed(self, now: float) -> None:
        due = False
        for queue in self.attended:
            if queue.watch.polling:
                continue
            if queue.watch.poll_from - self.alarm.early > now:
                self.alarm.set(queue.watch.poll_from, now)
            else:
                queue.watch.polling = due = True
        if due:
            self._spin_soon()

    def _spin(self) -> None:
        """Poll each queue that is being polled once; repeat in the next turn of the loop while there are any."""
        self._spinning = False
        budget = MOST_PER_TURN
        again = False
        now = self.device_state.driver.now()
        with self.query_guard:
            for queue in tuple(self.attended):
                if not queue.watch.polling:
                    continue
                if budget <= 0:
                    again = True
                    break
                resolved = queue.poll(budget, awaited=True)
                budget -= resolved
                if resolved and budget > 0:
                    queue.watch.polling = False
                    if queue in self.attended:
                        self.plan(queue)
                elif now >= queue.watch.poll_until and not resolved:
                    queue.watch.polling = False
                    if queue in self.attended:
                        self._park(queue, queue.awaited()[0])
                again = again or queue.watch.polling
        if again:
            self._spin_soon()

    def _park(self, queue: StreamQueue, operation: StreamOperation[Any] | None) -> None:
        """Wait for a notification of the awaited operation; without a free notifier, query by a timer."""
        if operation is None:
            self.stop_attending(queue)
            return
        queue.watch.poll_from = math.inf
        if not self._arm(queue, operation):
            at = self._ticked[queue] = self.device_state.driver.now() + TICK_SECONDS
            self._set_tick(at)
        elif self.device_state.policy.unknown > 0.0:
            # A notifier may be late: after copies it came when their engine was idle, 2.8 ms after its event
            # (measured). So query in between, and more rarely the longer the wait has taken.
            now = self.device_state.driver.now()
            wait = max(RECHECK_SECONDS, (now - queue.watch.since) / 8)
            queue.watch.poll_from = (
                now + wait + self.alarm.early
            )  # the alarm subtracts it, and this moment needs no lead
            queue.watch.poll_until = now  # one query
            self.alarm.set(queue.watch.poll_from, now)

    def _arm(self, queue: StreamQueue, operation: StreamOperation[Any]) -> bool:
        """Arm a notifier, unless one is armed. Return whether it comes for this operation, or earlier."""
        if queue.watch.armed is not None:
            return queue.watch.armed.id <= operation.id
        try:
            driver = self.device_state.driver
            queue.watch.armed = self.notifier_pool.arm(driver, queue, operation, self.device_state.tokens)
        except DeviceFault as fault:
            self.device_state.driver.blame(queue.name_awaited())
            self.fault(fault, operation)
        except AiocudaError as error:
            self.report_refusal(error)  # without a notifier, the timer queries
        self.parks += queue.watch.armed is not None
        return queue.watch.armed is not None

    # -- wake-ups ------------------------------------------------------------------------------------------------

    def _wake_from_thread(self) -> None:
        """Wake the loop from another thread. Used if the loop has no `add_reader`, so that it cannot watch its port."""
        if self.closed:
            return
        try:
            self.loop.call_soon_threadsafe(self._on_port)
        except RuntimeError:
            if not self.loop.is_closed():
                raise  # only a closed loop may refuse

    def _on_port(self) -> None:
        """Handle the tags in the port: of notifiers, and of finished jobs."""
        if self.closed:
            return
        queues: dict[StreamQueue, None] = {}
        tags = self._tags
        tags[:0] = self.notifier_pool.port.drain()[::-1]
        try:
            while tags:
                tag = tags.pop()
                self.notifications += 1
                if tag & JOB:
                    self.guard(self.jobs.finished, tag)
                    continue
                armed = self.notifier_pool.disarm(tag, self.device_state.tokens)
                if armed is not None and armed.queue.reactor is self:
                    armed.queue.watch.armed = None
                    queues[armed.queue] = None
        finally:
            if tags:  # interrupted
                self.loop.call_soon(self._on_port)
        if queues:
            self._look(queues)

    def _on_tick(self) -> None:
        """Query the streams without a notifier that are due."""
        self._tick_at = math.inf
        self._tick = None
        # Streams that are due soon are queried now: one wake-up of the loop costs as much as ten queries.
        soon = self.device_state.driver.now() + self._tick_cycle() / 4
        self._look({queue: None for queue, at in self._ticked.items() if at <= soon})
        if self._ticked:
            self._set_tick(min(self._ticked.values()))

    def _set_tick(self, at: float) -> None:
        """Have the timer fire at this time, or earlier."""
        if at >= self._tick_at:
            return
        later, self._tick = (
            self._tick,
            self.loop.call_later(max(0.0, at - self.device_state.driver.now()), self._on_tick),
        )
        self._tick_at = at  # after the timer is set: Ctrl-C in between must not leave a time without a timer
        if later is not None:
            later.cancel()

    def _next_tick(self, queue: StreamQueue) -> float:
        """Return the time at which to query a stream without a notifier again."""
        now = self.device_state.driver.now()
        wait = min(self._tick_cycle(), TICK_LATENESS * (now - queue.watch.since))
        return now + max(TICK_SECONDS, wait)

    def _tick_cycle(self) -> float:
        """Return the seconds in which every stream without a notifier is queried once."""
        return max(TICK_SECONDS, TICK_SECONDS_PER_QUEUE * len(self._ticked))

    def _look(self, queues: dict[StreamQueue, None]) -> None:
        """Poll the queues, and make new plans for them."""
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in queues:
                if budget > 0:
                    resolved = queue.poll(budget, awaited=True)
                    budget -= resolved
                    if not resolved and queue in self._ticked:
                        self._ticked[queue] = self._next_tick(queue)  # no new plan: it still has no notifier
                        continue
                if queue in self.queues and (budget > 0 or not self._goes_on(queue)):
                    self.plan(queue)

    def _goes_on(self, queue: StreamQueue) -> bool:
        """Continue in the next turn of the loop if the queue is awaited: the budget is spent. Return whether it is."""
        if not queue.watch.attended:
            return False
        queue.watch.polling = True
        self._spin_soon()
        return True

    def _set_watchdog(self) -> None:
        # In an empty context: what the watchdog logs concerns no single task.
        self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch, context=Context())
        if self._loop_watch is not None:
            self._loop_watch.expect(WATCHDOG_SECONDS)

    def _watch(self) -> None:
        """Do one pass of the watchdog, which does not depend on notifications."""
        self._watchdog = None
        self.watchdog_wakes += 1
        if self._loop_watch is not None:
            self._loop_watch.arrived()
        try:
            self._look_at_everything()
            for sweep in self.sweeps:
                self.guard(sweep)
        finally:  # after any failure: without the watchdog, a fault would wake no waiter
            if self.queues or self.notifier_pool.armed:
                self.watch_again()
            if self._watchdog is None and self._loop_watch is not None:
                self._loop_watch.rest()

    def watch_again(self) -> None:
        """Let the watchdog do another pass, also if there is no queue then."""
        if self._watchdog is None and not self.closed:
            self._set_watchdog()

    def _watched_now(self) -> list[StreamQueue]:
        """Return the queues for this pass of the watchdog: all, or the next `MOST_PER_WATCH`."""
        queues = list(itertools.islice(self.queues, MOST_PER_WATCH))
        if len(queues) < len(self.queues):
            for queue in queues:
                del self.queues[queue]
                self.queues[queue] = None
        return queues

    def _look_at_everything(self) -> None:
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in self._watched_now():
                resolved = 0 if queue.is_stuck() else queue.poll(max(budget, 1))
                budget -= resolved
                queue.pump()
                if queue.idle:
                    self.deactivate(queue)
                elif (resolved or not queue.watch.attended) and (budget > 0 or not self._goes_on(queue)):
                    self.plan(queue)
        fault = self.device_state.driver.fault
        if fault is not None and not self.faulted:
            self.fault(fault)
        for armed in self.notifier_pool.tick(self.device_state.tokens):
            self.lost_wakes += 1
            armed.queue.watch.armed = None
            log(
                "warning", "notification_lost", armed.context, device=self.device_state.properties.name,
                stream=armed.queue.name, operation=armed.id, lost=self.lost_wakes, label=armed.label,
            )  # fmt: skip
            if armed.queue in self.queues:
                self.plan(armed.queue)

    # -- faults and the end --------------------------------------------------------------------------------------

    def fault(self, fault: DeviceFault, operation: StreamOperation[Any] | None = None) -> None:
        """Fail the operations of this loop on all devices of the driver: a fault ends all of them.

        Other loops find the fault by their own watchdogs, or by a driver call. A closed loop has no waiters: each
        device reclaims its queues there. The logged event has the context of ``operation``: the oldest unfinished one
        of the stream whose query has found the fault.
        """
        fault = self.device_state.driver.fault or fault
        was_known, failed = self.faulted, self.failed
        self.fail_all(fault)
        if self.loop.is_closed():
            return
        for reactor in [known() for known in list(reactors_of(self.device_state.driver))]:
            if reactor is not None and reactor.loop is self.loop and not (reactor.faulted or reactor.closed):
                reactor.fail_all(fault)
        if not was_known:
            log(
                "error", "device_fault", None if operation is None else operation.context,
                device=self.device_state.properties.name, code=fault.code, error=str(fault),
                operation=fault.operation, failed=self.failed - failed,
                label=None if operation is None else operation.label,
            )  # fmt: skip

    def fail_all(self, fault: DeviceFault) -> None:
        """Fail all unfinished operations, awaited or not. Makes no driver call."""
        self.faulted = True
        for queue in tuple(self.queues):
            queue.fail_all(fault)
            self.deactivate(queue)
            queue.watch.armed = None
        self.notifier_pool.silence(self.device_state.tokens)

    def guard(self, work: Callable[..., object], *arguments: object) -> None:
        """Call a function that has no waiter. The loop's exception handler gets its error."""
        try:
            work(*arguments)
        except DeviceFault as fault:
            self.fault(fault)
        except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
            self.report(f"{getattr(work, '__qualname__', work)} failed", error)

    def report(self, message: str, error: BaseException) -> None:
        """Pass an error to the loop's exception handler; raise it if it is a `KeyboardInterrupt` or `SystemExit`."""
        if isinstance(error, LEAVES_LOOP):
            raise error
        self.loop.call_exception_handler({"message": f"aiocuda: {message}", "exception": error})

    def report_refusal(self, error: AiocudaError) -> None:
        """Report, once, that the driver refused a query or a notifier. No operation has caused it."""
        if not self._complained:
            self._complained = True
            self.report("the driver refused to say how far it is; it is asked again", error)

    def close(self) -> None:
        """Stop watching. The loop may be closed already."""
        if self.closed:
            return
        self.closed = True
        for timer in (self._watchdog, self._tick):
            if timer is not None:
                timer.cancel()
        if self._loop_watch is not None:
            self._loop_watch.rest()
        self.alarm.close()
        finishers = self.jobs.close()
        if not self.loop.is_closed():
            if self._descriptor is not None:
                self.loop.remove_reader(self._descriptor)
            for finish in finishers:
                self.guard(finish)
        self.notifier_pool.give(self.device_state.driver, self.device_state.tokens)
