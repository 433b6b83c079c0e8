"""Reactor: one event loop's watch over one device.

One poller, one port, one alarm, one watchdog, however many streams and waiters. Each queue that somebody waits in has a
plan: poll from one moment to another, sleep before, park after. Every resolve follows a query.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable

from .._user_code import LEAVES_LOOP
from .._wakeups import Wakes
from ..errors import AiocudaError, DeviceFault
from ._alarm import Alarm
from ._device_state import DeviceState
from ._jobs import JOB, Jobs
from ._notifiers import NotifierPool
from ._operation import LANDING
from ._query_guard import QueryGuard
from ._resolve import MOST_PER_TURN
from ._stream_queue import StreamQueue
from ._turn import Turn

__all__ = ["Reactor"]

#: The watchdog looks at the streams with unresolved operations this often, awaited or not: after a fault, notifications
#: never come.
WATCHDOG_SECONDS = 0.025

#: Streams that it looks at each time, in turn. One query finds a fault of the device, whichever stream is asked.
MOST_PER_WATCH = 32

#: A stream without a notifier is queried this often, at most.
TICK_SECONDS = 0.001

#: The more such streams there are, the more rarely each is queried: a look takes 1.5 to 5 µs, so that all of them take
#: at most 2 % of a core. (Queried every millisecond, 232 idle streams took 30 %.)
TICK_SECONDS_PER_LANE = 250e-6

#: But no stream is queried later than by this part of the time that it has waited.
TICK_LATENESS = 1 / 32

#: A parked queue is asked once more after this, at the earliest.
RECHECK_SECONDS = 0.001

#: A sleep longer than this is parked too, in case the work ends earlier than predicted.
LONG_SLEEP = 0.005


class Reactor:
    """Resolves the operations of one loop on one device."""

    COUNTS = (
        *("submitted", "resolved", "failed", "abandoned", "polls", "sleeps", "parks"),
        *("notifications", "watchdog_wakes", "lost_wakes"),
    )

    __slots__ = (
        *COUNTS,
        *("__weakref__", "_complained", "_descriptor", "_spinning", "_tags"),
        *(
            "_tick",
            "_tick_at",
            "_ticked",
            "_watchdog",
            "alarm",
            "query_guard",
            "attended",
            "closed",
            "faulted",
            "device_state",
        ),
        *("jobs", "queues", "loop", "on_progress", "opened", "notifier_pool", "sweeps", "turn", "wakes"),
    )

    def __init__(self, device_state: DeviceState, loop: asyncio.AbstractEventLoop) -> None:
        self.device_state = device_state
        self.loop = loop
        self.closed = self.faulted = False
        self.query_guard = QueryGuard(self)
        # Dictionaries for sets: a simulation goes through them in the same order in every process.
        self.queues: dict[StreamQueue, None] = {}  # with something unfinished
        self.attended: dict[StreamQueue, None] = {}  # with somebody who waits
        self._ticked: dict[StreamQueue, float] = {}  # parked without a notifier: when to query each one next
        self._tags: list[int] = []  # that have come, and nobody has looked at; the oldest is the last
        self._spinning = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = math.inf  # when it fires, by the driver's clock
        self.turn = Turn(loop, device_state.driver.now)
        self.wakes = Wakes.of(loop)
        self._complained = False
        #: Done once per watchdog tick: finalisers leave their blocks to them.
        self.sweeps: tuple[Callable[[], object], ...] = ()
        #: Called whenever something was resolved, while somebody needs that: the staging ring.
        self.on_progress: Callable[[], None] | None = None
        # Counted where they happen.
        self.opened: dict[StreamQueue, None] = {}
        self.submitted = self.resolved = self.failed = self.abandoned = 0
        self.polls = self.sleeps = self.parks = self.notifications = self.watchdog_wakes = self.lost_wakes = 0
        self.notifier_pool = NotifierPool.take(device_state.driver, device_state.device, self._woken_elsewhere)
        self.jobs = Jobs(device_state.driver, self.notifier_pool.port)
        device_state.watched_by(self)
        descriptor = self._descriptor = self.notifier_pool.port.fileno()
        if descriptor is not None:
            loop.add_reader(descriptor, self._on_port)
        else:
            loop.call_soon(self._on_port)  # what came for the loop that had this port before, nobody has looked at
        self.alarm = Alarm(loop, device_state.driver.now, self._alarmed, watches=descriptor is not None)

    # -- queues come and go ---------------------------------------------------------------------------------------

    def activate(self, queue: StreamQueue) -> None:
        """The queue has something unfinished; the watchdog finds out when it has not any more."""
        queue.active = True
        self.queues[queue] = None
        self.device_state.look_for_others()
        if self._watchdog is None and not self.closed:
            self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch)

    def deactivate(self, queue: StreamQueue) -> None:
        """Nothing unfinished in it."""
        queue.active = False
        self.queues.pop(queue, None)
        self.leave(queue)

    def leave(self, queue: StreamQueue) -> None:
        """Nobody waits in it any more."""
        self.attended.pop(queue, None)
        self._ticked.pop(queue, None)
        queue.attended = queue.polling = False

    def retire(self, queue: StreamQueue) -> None:
        """The queue is closed; what it counted stays."""
        if queue in self.opened:
            del self.opened[queue]
            self.submitted += queue.enqueued
        self.deactivate(queue)

    def counts(self) -> list[int]:
        """What was counted, in the order of `COUNTS`."""
        counts = [getattr(self, name) for name in self.COUNTS]
        counts[0] += sum(queue.enqueued for queue in tuple(self.opened))
        return counts

    def inline(self, queue: StreamQueue) -> int:
        """Poll for an await that is just beginning: all of them in one turn resolve no more than one poll does."""
        left = MOST_PER_TURN - self.turn.inlined
        if left <= 0:
            return 0
        resolved = queue.poll(left)
        if resolved:
            self.turn.has_inlined(resolved)
        return resolved

    # -- poll, sleep, park ---------------------------------------------------------------------------------------

    def plan(self, queue: StreamQueue) -> None:
        """Decide how to watch the queue, now that somebody waits or something has changed."""
        if self.closed:
            return
        operation, expected, spread = queue.awaited()
        if operation is None or operation._state == LANDING:
            self.leave(queue)  # what lands reports by itself
            return
        self.attended[queue] = None
        queue.attended = True
        now = queue.watched_since = self.device_state.driver.now()
        queue.poll_from, queue.poll_until = self.device_state.policy.plan(now, expected, spread)
        self._ticked.pop(queue, None)
        if queue.poll_from <= now:
            if now < queue.poll_until:
                queue.polling = True
                self._spin_soon()
            else:
                queue.polling = False
                self._park(queue)
        else:
            queue.polling = False
            self.sleeps += 1
            if queue.poll_from - now > LONG_SLEEP:
                self._arm(queue)
            self.alarm.set(queue.poll_from, now)

    def _spin_soon(self) -> None:
        if not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin)

    def _alarmed(self, now: float) -> None:
        due = False
        for queue in self.attended:
            if queue.polling:
                continue
            if queue.poll_from - self.alarm.early > now:
                self.alarm.set(queue.poll_from, now)
            else:
                queue.polling = due = True
        if due:
            self._spin_soon()

    def _spin(self) -> None:
        """One look at every queue that is being polled; again in the next turn while there are any."""
        self._spinning = False
        budget = MOST_PER_TURN
        again = False
        now = self.device_state.driver.now()
        with self.query_guard:
            for queue in tuple(self.attended):
                if not queue.polling:
                    continue
                if budget <= 0:
                    again = True
                    break
                resolved = queue.poll(budget)
                budget -= resolved
                if resolved and budget > 0:
                    queue.polling = False
                    if queue in self.attended:
                        self.plan(queue)
                elif now >= queue.poll_until and not resolved:
                    queue.polling = False
                    if queue in self.attended:
                        self._park(queue)
                again = again or queue.polling
        if again:
            self._spin_soon()

    def _park(self, queue: StreamQueue) -> None:
        """Wait for a notification; without a free notifier, query now and then."""
        if queue.awaited()[0] is None:
            self.leave(queue)
            return
        queue.poll_from = math.inf
        if not self._arm(queue):
            at = self._ticked[queue] = self.device_state.driver.now() + TICK_SECONDS
            self._set_tick(at)
        elif self.device_state.policy.unknown > 0.0:
            # A notifier may be late: behind copies it rang when their engine fell idle, 2.8 ms after its event
            # (measured). So ask now and then, the longer it takes the more rarely.
            now = self.device_state.driver.now()
            wait = max(RECHECK_SECONDS, (now - queue.watched_since) / 8)
            queue.poll_from = now + wait + self.alarm.early  # which the alarm takes off: there is no end to be met here
            queue.poll_until = now  # one look
            self.alarm.set(queue.poll_from, now)

    def _arm(self, queue: StreamQueue) -> bool:
        """Have a notifier ring for the queue's oldest waiter, or for something before it."""
        operation = queue.awaited()[0]
        if operation is None:
            return False
        if queue.armed is not None:
            return queue.armed.operation.id <= operation.id
        try:
            queue.armed = self.notifier_pool.arm(queue, operation, self.device_state.tokens)
        except DeviceFault as fault:
            self.device_state.driver.blame(queue.named(operation))
            self.fault(fault)
        except AiocudaError as error:
            self.complain(error)  # without a notifier, the timer asks
        self.parks += queue.armed is not None
        return queue.armed is not None

    # -- what wakes it -------------------------------------------------------------------------------------------

    def _woken_elsewhere(self) -> None:
        """From a thread, where the loop cannot watch a descriptor."""
        if self.closed:
            return
        try:
            self.loop.call_soon_threadsafe(self._on_port)
        except RuntimeError:
            if not self.loop.is_closed():
                raise  # a closed loop wants to hear nothing; another reason is a bug

    def _on_port(self) -> None:
        """Tags have come: notifiers that rang, jobs that ended."""
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
                armed = self.notifier_pool.heard(tag, self.device_state.tokens)
                if armed is not None and armed.queue.reactor is self:
                    armed.queue.armed = None
                    queues[armed.queue] = None
        finally:
            if tags:  # interrupted
                self.loop.call_soon(self._on_port)
        self._look(queues)

    def _on_tick(self) -> None:
        """Query the streams without a notifier whose time has come."""
        self._tick_at = math.inf
        self._tick = None
        # Streams that are due soon are queried at once: one wake-up of the loop costs as much as ten queries.
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
        wait = min(self._tick_cycle(), TICK_LATENESS * (now - queue.watched_since))
        return now + max(TICK_SECONDS, wait)

    def _tick_cycle(self) -> float:
        """Return the seconds in which every stream without a notifier is queried once."""
        return max(TICK_SECONDS, TICK_SECONDS_PER_LANE * len(self._ticked))

    def _look(self, queues: dict[StreamQueue, None]) -> None:
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in queues:
                if budget > 0:
                    ticked = queue in self._ticked
                    resolved = 0 if ticked and queue.is_stuck() else queue.poll(budget)
                    budget -= resolved
                    if not resolved and queue in self._ticked:
                        self._ticked[queue] = self._next_tick(queue)  # no plan: it is still without a notifier
                        continue
                if queue in self.queues and not self._goes_on(queue, budget):
                    self.plan(queue)

    def _goes_on(self, queue: StreamQueue, budget: int) -> bool:
        """Was this look cut short? Then the next turn goes on with it, and needs no notifier for that."""
        if budget > 0 or not queue.attended:
            return False
        queue.polling = True
        self._spin_soon()
        return True

    def _watch(self) -> None:
        """The watchdog: whatever the notifications did, look at everything."""
        self._watchdog = None
        self.watchdog_wakes += 1
        try:
            self._look_at_everything()
            for sweep in self.sweeps:
                self.guard(sweep)
        finally:  # whatever it was that failed: without the watchdog a fault would find nobody
            if (self.queues or self.notifier_pool.armed) and not self.closed:
                self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch)

    def _watched_now(self) -> list[StreamQueue]:
        """Return the streams that the watchdog looks at this time: all, or the next `MOST_PER_WATCH`."""
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
                if queue.host_queue.entries:
                    queue.host_queue.pump()
                if queue.idle:
                    self.deactivate(queue)
                elif (resolved or not queue.attended) and not self._goes_on(queue, budget):
                    self.plan(queue)
        fault = self.device_state.driver.fault
        if fault is not None and not self.faulted:
            self.fault(fault)
        for armed in self.notifier_pool.tick(self.device_state.tokens):
            self.lost_wakes += 1
            armed.queue.armed = None
            if armed.queue in self.queues:
                self.plan(armed.queue)

    # -- faults and the end --------------------------------------------------------------------------------------

    def fault(self, fault: DeviceFault) -> None:
        """It ends all devices of the driver: fail what this loop has on any of them."""
        self.device_state.spread(self.device_state.driver.fault or fault, self)

    def lose(self, fault: DeviceFault) -> None:
        """Fail everything unfinished, awaited or not. Nothing of this touches the driver."""
        self.faulted = True
        for queue in tuple(self.queues):
            queue.fail_all(fault)
            self.deactivate(queue)
            queue.armed = None
        self.notifier_pool.silence(self.device_state.tokens)

    def guard(self, work: Callable[..., object], *arguments: object) -> None:
        """Do work without a waiter. The loop's exception handler gets its failure, and everything else goes on."""
        try:
            work(*arguments)
        except DeviceFault as fault:
            self.fault(fault)
        except BaseException as error:  # noqa: BLE001 - the loop's exception handler gets it
            self.tell(f"{getattr(work, '__qualname__', work)} failed", error)

    def tell(self, what: str, error: BaseException) -> None:
        """Give a failure without a waiter to the loop's exception handler, or raise it if it leaves the loop."""
        if isinstance(error, LEAVES_LOOP):
            raise error
        self.loop.call_exception_handler({"message": f"aiocuda: {what}", "exception": error})

    def complain(self, error: AiocudaError) -> None:
        """The driver refused a query or a notifier. Nobody's operation is to blame, so the loop is told, once."""
        if not self._complained:
            self._complained = True
            self.tell("the driver refused to say how far it is; it is asked again", error)

    def close(self) -> None:
        """Stop watching. The loop may be closed already."""
        if self.closed:
            return
        self.closed = True
        for timer in (self._watchdog, self._tick):
            if timer is not None:
                timer.cancel()
        self.alarm.close()
        told = self.jobs.close()
        if not self.loop.is_closed():
            if self._descriptor is not None:
                self.loop.remove_reader(self._descriptor)
            for tell in told:
                self.guard(tell)
        self.notifier_pool.give(self.device_state.driver, self.device_state.tokens)
