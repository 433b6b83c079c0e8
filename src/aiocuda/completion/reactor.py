"""Reactor: one event loop's watch over one device.

One poller, one port, one alarm, one watchdog, however many streams and waiters. Each lane that somebody waits in has a
plan: poll from one moment to another, sleep before, park after. Every resolve follows a query.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable

from ..errors import AiocudaError, DeviceFault
from ..user_code import LEAVES_LOOP
from ..waking import Wakes
from .alarm import Alarm
from .asking import Asking
from .bells import Rack
from .hub import Hub
from .jobs import JOB, Jobs
from .lane import Lane
from .operation import LANDING
from .resolve import MOST_PER_TURN
from .turn import Turn

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

#: A parked lane is asked once more after this, at the earliest.
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
        *("_tick", "_tick_at", "_ticked", "_watchdog", "alarm", "asking", "attended", "closed", "faulted", "hub"),
        *("jobs", "lanes", "loop", "on_progress", "opened", "rack", "sweeps", "turn", "wakes"),
    )

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        self.hub = hub
        self.loop = loop
        self.closed = self.faulted = False
        self.asking = Asking(self)
        # Dictionaries for sets: a simulation goes through them in the same order in every process.
        self.lanes: dict[Lane, None] = {}  # with something unfinished
        self.attended: dict[Lane, None] = {}  # with somebody who waits
        self._ticked: dict[Lane, float] = {}  # parked without a notifier: when to query each one next
        self._tags: list[int] = []  # that have come, and nobody has looked at; the oldest is the last
        self._spinning = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = math.inf  # when it fires, by the driver's clock
        self.turn = Turn(loop, hub.driver.now)
        self.wakes = Wakes.of(loop)
        self._complained = False
        #: Done once per watchdog tick: finalisers leave their blocks to them.
        self.sweeps: tuple[Callable[[], object], ...] = ()
        #: Called whenever something was resolved, while somebody needs that: the staging ring.
        self.on_progress: Callable[[], None] | None = None
        # Counted where they happen.
        self.opened: dict[Lane, None] = {}
        self.submitted = self.resolved = self.failed = self.abandoned = 0
        self.polls = self.sleeps = self.parks = self.notifications = self.watchdog_wakes = self.lost_wakes = 0
        self.rack = Rack.take(hub.driver, hub.device, self._woken_elsewhere)
        self.jobs = Jobs(hub.driver, self.rack.port)
        hub.watched_by(self)
        descriptor = self._descriptor = self.rack.port.fileno()
        if descriptor is not None:
            loop.add_reader(descriptor, self._on_port)
        else:
            loop.call_soon(self._on_port)  # what came for the loop that had this port before, nobody has looked at
        self.alarm = Alarm(loop, hub.driver.now, self._alarmed, watches=descriptor is not None)

    # -- lanes come and go ---------------------------------------------------------------------------------------

    def activate(self, lane: Lane) -> None:
        """The lane has something unfinished; the watchdog finds out when it has not any more."""
        lane.active = True
        self.lanes[lane] = None
        self.hub.look_for_others()
        if self._watchdog is None and not self.closed:
            self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch)

    def deactivate(self, lane: Lane) -> None:
        """Nothing unfinished in it."""
        lane.active = False
        self.lanes.pop(lane, None)
        self.leave(lane)

    def leave(self, lane: Lane) -> None:
        """Nobody waits in it any more."""
        self.attended.pop(lane, None)
        self._ticked.pop(lane, None)
        lane.attended = lane.polling = False

    def retire(self, lane: Lane) -> None:
        """The lane is closed; what it counted stays."""
        if lane in self.opened:
            del self.opened[lane]
            self.submitted += lane.enqueued
        self.deactivate(lane)

    def counts(self) -> list[int]:
        """What was counted, in the order of `COUNTS`."""
        counts = [getattr(self, name) for name in self.COUNTS]
        counts[0] += sum(lane.enqueued for lane in tuple(self.opened))
        return counts

    def inline(self, lane: Lane) -> int:
        """Poll for an await that is just beginning: all of them in one turn resolve no more than one poll does."""
        left = MOST_PER_TURN - self.turn.inlined
        if left <= 0:
            return 0
        resolved = lane.poll(left)
        if resolved:
            self.turn.has_inlined(resolved)
        return resolved

    # -- poll, sleep, park ---------------------------------------------------------------------------------------

    def plan(self, lane: Lane) -> None:
        """Decide how to watch the lane, now that somebody waits or something has changed."""
        if self.closed:
            return
        operation, expected, spread = lane.awaited()
        if operation is None or operation._state == LANDING:
            self.leave(lane)  # what lands reports by itself
            return
        self.attended[lane] = None
        lane.attended = True
        now = lane.watched_since = self.hub.driver.now()
        lane.poll_from, lane.poll_until = self.hub.policy.plan(now, expected, spread)
        self._ticked.pop(lane, None)
        if lane.poll_from <= now:
            if now < lane.poll_until:
                lane.polling = True
                self._spin_soon()
            else:
                lane.polling = False
                self._park(lane)
        else:
            lane.polling = False
            self.sleeps += 1
            if lane.poll_from - now > LONG_SLEEP:
                self._arm(lane)
            self.alarm.set(lane.poll_from, now)

    def _spin_soon(self) -> None:
        if not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin)

    def _alarmed(self, now: float) -> None:
        due = False
        for lane in self.attended:
            if lane.polling:
                continue
            if lane.poll_from - self.alarm.early > now:
                self.alarm.set(lane.poll_from, now)
            else:
                lane.polling = due = True
        if due:
            self._spin_soon()

    def _spin(self) -> None:
        """One look at every lane that is being polled; again in the next turn while there are any."""
        self._spinning = False
        budget = MOST_PER_TURN
        again = False
        now = self.hub.driver.now()
        with self.asking:
            for lane in tuple(self.attended):
                if not lane.polling:
                    continue
                if budget <= 0:
                    again = True
                    break
                resolved = lane.poll(budget)
                budget -= resolved
                if resolved and budget > 0:
                    lane.polling = False
                    if lane in self.attended:
                        self.plan(lane)
                elif now >= lane.poll_until and not resolved:
                    lane.polling = False
                    if lane in self.attended:
                        self._park(lane)
                again = again or lane.polling
        if again:
            self._spin_soon()

    def _park(self, lane: Lane) -> None:
        """Wait for a notification; without a free notifier, query now and then."""
        if lane.awaited()[0] is None:
            self.leave(lane)
            return
        lane.poll_from = math.inf
        if not self._arm(lane):
            at = self._ticked[lane] = self.hub.driver.now() + TICK_SECONDS
            self._set_tick(at)
        elif self.hub.policy.unknown > 0.0:
            # A bell may be late: behind copies it rang when their engine fell idle, 2.8 ms after its event (measured).
            # So ask now and then, the longer it takes the more rarely.
            now = self.hub.driver.now()
            wait = max(RECHECK_SECONDS, (now - lane.watched_since) / 8)
            lane.poll_from = now + wait + self.alarm.early  # which the alarm takes off: there is no end to be met here
            lane.poll_until = now  # one look
            self.alarm.set(lane.poll_from, now)

    def _arm(self, lane: Lane) -> bool:
        """Have a bell ring for the lane's oldest waiter, or for something before it."""
        operation = lane.awaited()[0]
        if operation is None:
            return False
        if lane.armed is not None:
            return lane.armed.operation.id <= operation.id
        try:
            lane.armed = self.rack.arm(lane, operation, self.hub.tokens)
        except DeviceFault as fault:
            self.hub.driver.blame(lane.named(operation))
            self.fault(fault)
        except AiocudaError as error:
            self.complain(error)  # without a bell, the timer asks
        self.parks += lane.armed is not None
        return lane.armed is not None

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
        """Tags have come: bells that rang, jobs that ended."""
        if self.closed:
            return
        lanes: dict[Lane, None] = {}
        tags = self._tags
        tags[:0] = self.rack.port.drain()[::-1]
        try:
            while tags:
                tag = tags.pop()
                self.notifications += 1
                if tag & JOB:
                    self.guard(self.jobs.finished, tag)
                    continue
                armed = self.rack.heard(tag, self.hub.tokens)
                if armed is not None and armed.lane.reactor is self:
                    armed.lane.armed = None
                    lanes[armed.lane] = None
        finally:
            if tags:  # interrupted
                self.loop.call_soon(self._on_port)
        self._look(lanes)

    def _on_tick(self) -> None:
        """Query the streams without a notifier whose time has come."""
        self._tick_at = math.inf
        self._tick = None
        # Streams that are due soon are queried at once: one wake-up of the loop costs as much as ten queries.
        soon = self.hub.driver.now() + self._tick_cycle() / 4
        self._look({lane: None for lane, at in self._ticked.items() if at <= soon})
        if self._ticked:
            self._set_tick(min(self._ticked.values()))

    def _set_tick(self, at: float) -> None:
        """Have the timer fire at this time, or earlier."""
        if at >= self._tick_at:
            return
        later, self._tick = self._tick, self.loop.call_later(max(0.0, at - self.hub.driver.now()), self._on_tick)
        self._tick_at = at  # after the timer is set: Ctrl-C in between must not leave a time without a timer
        if later is not None:
            later.cancel()

    def _next_tick(self, lane: Lane) -> float:
        """Return the time at which to query a stream without a notifier again."""
        now = self.hub.driver.now()
        wait = min(self._tick_cycle(), TICK_LATENESS * (now - lane.watched_since))
        return now + max(TICK_SECONDS, wait)

    def _tick_cycle(self) -> float:
        """Return the seconds in which every stream without a notifier is queried once."""
        return max(TICK_SECONDS, TICK_SECONDS_PER_LANE * len(self._ticked))

    def _look(self, lanes: dict[Lane, None]) -> None:
        budget = MOST_PER_TURN
        with self.asking:
            for lane in lanes:
                if budget > 0:
                    ticked = lane in self._ticked
                    resolved = 0 if ticked and lane.is_stuck() else lane.poll(budget)
                    budget -= resolved
                    if not resolved and lane in self._ticked:
                        self._ticked[lane] = self._next_tick(lane)  # no plan: it is still without a notifier
                        continue
                if lane in self.lanes and not self._goes_on(lane, budget):
                    self.plan(lane)

    def _goes_on(self, lane: Lane, budget: int) -> bool:
        """Was this look cut short? Then the next turn goes on with it, and needs no bell for that."""
        if budget > 0 or not lane.attended:
            return False
        lane.polling = True
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
            if (self.lanes or self.rack.armed) and not self.closed:
                self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch)

    def _watched_now(self) -> list[Lane]:
        """Return the streams that the watchdog looks at this time: all, or the next `MOST_PER_WATCH`."""
        lanes = list(itertools.islice(self.lanes, MOST_PER_WATCH))
        if len(lanes) < len(self.lanes):
            for lane in lanes:
                del self.lanes[lane]
                self.lanes[lane] = None
        return lanes

    def _look_at_everything(self) -> None:
        budget = MOST_PER_TURN
        with self.asking:
            for lane in self._watched_now():
                resolved = 0 if lane.is_stuck() else lane.poll(max(budget, 1))
                budget -= resolved
                if lane.queue.entries:
                    lane.queue.pump()
                if lane.idle:
                    self.deactivate(lane)
                elif (resolved or not lane.attended) and not self._goes_on(lane, budget):
                    self.plan(lane)
        fault = self.hub.driver.fault
        if fault is not None and not self.faulted:
            self.fault(fault)
        for armed in self.rack.tick(self.hub.tokens):
            self.lost_wakes += 1
            armed.lane.armed = None
            if armed.lane in self.lanes:
                self.plan(armed.lane)

    # -- faults and the end --------------------------------------------------------------------------------------

    def fault(self, fault: DeviceFault) -> None:
        """It ends all devices of the driver: fail what this loop has on any of them."""
        self.hub.spread(self.hub.driver.fault or fault, self)

    def lose(self, fault: DeviceFault) -> None:
        """Fail everything unfinished, awaited or not. Nothing of this touches the driver."""
        self.faulted = True
        for lane in tuple(self.lanes):
            lane.fail_all(fault)
            self.deactivate(lane)
            lane.armed = None
        self.rack.silence(self.hub.tokens)

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
        """The driver refused a query or a bell. Nobody's operation is to blame, so the loop is told; once is enough."""
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
        self.rack.give(self.hub.driver, self.hub.tokens)
