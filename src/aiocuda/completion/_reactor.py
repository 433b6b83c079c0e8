"""Reactor: watches the stream queues of one event loop on one device, for any number of streams and waiters.

Notifications, polls and timers only say when to query. An operation is resolved only after a query.

- A queue is *attended* while a task waits for one of its operations. Its *plan* is to be polled or parked, and
  `_wait_rule` says when.
- A *polled* queue is queried in each turn of the loop.
- A *parked* queue waits for a host callback, the *notifier*: that puts its *tag* into the *port*, which wakes the loop.
  Until then, the *alarm* queries the queue from time to time.
- The *watchdog* queries queues with unfinished operations, attended or not: every 25 ms, at most 32 of them in turn.
- A *budget* limits the operations that one pass resolves (`MOST_PER_TURN`), so that no turn of the loop takes long.
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
from .._core import LANDING, ReactorHot
from ..errors import AiocudaError, DeviceFault
from ._alarm import Alarm
from ._device_state import DeviceState
from ._host_queue import Pumps
from ._idle_moment import IdleMoments
from ._jobs import JOB, Jobs
from ._notifiers import WATCHES, ArmedNotifier, NotifierPool
from ._submission import SubmissionPace
from ._wait_rule import (
    HELD_UP_SECONDS,
    LATE_SECONDS,
    MOST_CHECKED,
    MOST_CHECKED_SECONDS,
    OVERDUE,
    SHORTEST,
    first_poll,
    next_look,
    step,
)
from ._waiting_calls import WaitingCalls, reactors_of

if TYPE_CHECKING:
    from .._core import Ring, StreamOperation
    from ._event_watch import EventWatch

__all__ = ["PollAllowance", "QueryGuard", "Reactor"]

#: Streams per pass of the watchdog, in turn. A query of any stream finds a fault of the device.
MOST_PER_WATCH = 32

#: What a turn of the loop takes beside a pass of polls: a query of its descriptors, and the call.
TURN_SECONDS = 10e-6

#: The part of a second's allowance that may be used at once. The rest comes back during the second.
BURST = 0.2


class QueryGuard:
    """A context manager around a pass of queries. Without it, a query makes another library's capture fail.

    It calls the driver only while `DeviceHot.guarded` is true. Passes may be nested: the outermost one ends it.

    Attributes
    ----------
    open : bool
        True between the driver's ``begin_queries`` and ``end_queries``. While it is False, `Ring.poll` does not query a
        guarded device.
    """

    __slots__ = ("_depth", "_device_state", "_reactor", "open")

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._device_state = reactor.device_state
        self._depth = 0
        self.open = False

    def __enter__(self) -> Self:
        if self._device_state.hot.guarded and not self.open:
            try:
                self._device_state.driver.begin_queries()
                self.open = True
            except DeviceFault:
                pass  # `Ring.poll` queries in spite of that: the driver raises the fault again, and it is handled there
            except AiocudaError as error:
                self._reactor.report_refusal(error)  # this pass makes no query
        self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self.open and not self._depth:
            self.open = False
            self.end()

    def end(self) -> None:
        """Make the driver's ``end_queries``: also for `Ring.linger`. A refusal is reported: it is no operation's."""
        try:
            self._device_state.driver.end_queries()
        except DeviceFault:
            pass  # the driver keeps the fault, and raises it again at the next query
        except AiocudaError as error:
            self._reactor.report_refusal(error)


class PollAllowance:
    """The time that a loop may poll beside armed host callbacks: a share of each second, for all streams together.

    ``share * BURST`` seconds may be spent at once. Spent time comes back at ``share * (1 - BURST)`` per second.

    Parameters
    ----------
    share
        Of each second; 1.0 for no limit, 0.0 for no polls.
    """

    __slots__ = ("_full_at", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._full_at = 0.0  # the time at which all of the allowance has come back

    def is_left(self, now: float) -> bool:
        """Return whether the loop may poll now: whether less than the whole burst is spent."""
        # A whole burst takes ``BURST / (1 - BURST)`` seconds to come back.
        return self._share >= 1.0 or (self._share > 0.0 and self._full_at - now < BURST / (1.0 - BURST))

    def spend(self, began: float, ended: float) -> None:
        """Count a pass of polls between two times, and the turn of the loop that it belongs to."""
        if self._share > 0.0:  # otherwise there is nothing to come back
            spent = (ended - began + TURN_SECONDS) / (self._share * (1.0 - BURST))
            self._full_at = max(self._full_at, began) + spent


class Reactor:
    """Resolves the operations of one loop on one device.

    Attributes
    ----------
    device_state : DeviceState
    loop : asyncio.AbstractEventLoop
    hot : ReactorHot
        What the core uses for each operation.
    closed : bool
        The reactor watches nothing any more.
    queues : dict of Ring
        The queues with unfinished operations.
    opened : dict of Ring
        All queues that are not closed.
    orphans : dict of Ring
        The queues that nothing watches any more, until `is_idle` has seen that the device has finished their work.
    query_guard : QueryGuard
    wakes : Wakes
    pumps : Pumps or None
        Submits from the host queues of streams that wait for each other; None before there are any.
    notifier_pool : NotifierPool
    guest : EventWatch or None
        The watch of `aiocuda.wait` on this device. It uses the same notifiers, and gets them when the reactor closes.
    jobs : Jobs
    idle_moments : IdleMoments
    alarm : Alarm
        Set for the next query of a parked queue.
    poll_allowance : PollAllowance
    sweeps : tuple of callables
        Called in each pass of the watchdog, for example to release the memory of objects that were collected.
    """

    #: The names of the counters.
    COUNTS = (
        *("submitted", "resolved", "failed", "abandoned", "polls", "sleeps", "parks"),
        *("notifications", "watchdog_wakes", "lost_wakes"),
    )

    __slots__ = ("__weakref__", "_complained", "_descriptor", "_held_up_until", "_last_notified", "_loop_watch",
                 "_spinning", "_tags", "_watchdog", "abandoned", "alarm", "closed", "device_state", "failed", "guest",
                 "hot", "idle_moments", "jobs", "loop", "lost_wakes", "notifications", "notifier_pool", "opened",
                 "orphans", "parks", "poll_allowance", "pumps", "query_guard", "queues", "sleeps", "submission_pace",
                 "submitted", "sweeps", "wakes", "watchdog_wakes")  # fmt: skip

    def __init__(self, device_state: DeviceState, loop: asyncio.AbstractEventLoop) -> None:
        self.device_state = device_state
        self.loop = loop
        self.hot = ReactorHot(loop, device_state.driver.now)
        self.closed = False
        self.query_guard = QueryGuard(self)
        # Dictionaries instead of sets: a simulation visits their keys in the same order in every process.
        self.queues: dict[Ring, None] = {}
        self._tags: list[int] = []  # read from the port and not handled yet; the oldest is the last
        self._spinning = False
        self._last_notified = -math.inf  # the time of the last notification of an operation
        self._held_up_until = -math.inf  # until then, callbacks count as late: see `_wait_rule`, Check
        self._watchdog: asyncio.TimerHandle | None = None
        # The turns of a simulated loop take no real time, so none can be too long.
        self._loop_watch = LoopWatch.of(loop) if device_state.driver.now is time.monotonic else None
        if self._loop_watch is not None:
            self._loop_watch.calls.add(WaitingCalls.of(device_state.driver))  # it reports which call blocks the loop
        self.submission_pace = SubmissionPace(loop)
        self.poll_allowance = PollAllowance(device_state.policy.share)
        self.wakes = Wakes.of(loop)
        self.pumps: Pumps | None = None
        self._complained = False
        self.sweeps: tuple[Callable[[], object], ...] = ()
        self.opened: dict[Ring, None] = {}
        self.orphans: dict[Ring, None] = {}
        self.submitted = self.failed = self.abandoned = 0
        self.sleeps = self.parks = self.notifications = self.watchdog_wakes = self.lost_wakes = 0
        self.guest: EventWatch | None = None
        self.notifier_pool = self._pool_of_waits() or NotifierPool.take(
            device_state.driver, device_state.device, self._wake_from_thread
        )
        self.jobs = Jobs(device_state.driver, self.notifier_pool.port)
        self.idle_moments = IdleMoments(self)
        reactors = reactors_of(device_state.driver)
        reactors[weakref.ref(self, reactors.pop)] = None  # until it is collected
        descriptor = self._descriptor = self.notifier_pool.port.fileno()
        if descriptor is not None:
            try:
                add_reader(loop, descriptor, self._on_port)
            except BaseException:
                self.notifier_pool.give(device_state.driver, device_state.tokens)
                raise
        else:
            loop.call_soon(self._on_port)  # tags may be left from the loop that had this port before
        self.alarm = Alarm(loop, device_state.driver.now, self._alarmed, watches=descriptor is not None)

    # -- the queues ----------------------------------------------------------------------------------------------

    def add(self, queue: Ring) -> None:
        """Count the operations of a new queue."""
        self.opened[queue] = None

    def activate(self, queue: Ring) -> None:
        """Watch a queue with unfinished operations. The watchdog deactivates it when it is idle."""
        queue.set_active(True)
        self.queues[queue] = None
        self.device_state.look_for_others()  # sets `hot.guarded` if a library that captures streams was imported
        self.watch_again()

    def deactivate(self, queue: Ring) -> None:
        """Stop watching an idle queue."""
        queue.set_active(False)
        self.queues.pop(queue, None)
        self.stop_attending(queue)

    def stop_attending(self, queue: Ring) -> None:
        """Neither poll nor park a queue any more: no query can find an end that a task waits for.

        An armed notifier stays armed.
        """
        self.hot.attended.pop(queue, None)
        queue.watch.attended = queue.watch.polling = False

    def retire(self, queue: Ring) -> None:
        """Stop watching a closed queue. Its number of operations stays in the totals of the reactor."""
        if queue in self.opened:
            del self.opened[queue]
            self.submitted += queue.enqueued
        if queue.pending:
            self.orphans[queue] = None  # before `deactivate`: another thread's `is_idle` must find the queue somewhere
        self.deactivate(queue)

    def is_idle(self) -> bool:
        """Return whether the device has finished all operations that it has got from this loop. Any thread may call it.

        A loop that runs resolves its operations itself. If it does not run, this method queries the driver.
        """
        watched = self.loop.is_running()
        for queue in list(self.queues):
            if queue.pending and (watched or not queue.rare.has_device_finished()):
                return False
        for queue in list(self.orphans):
            if not queue.rare.has_device_finished():
                return False
            self.orphans.pop(queue, None)
        return True

    def counts(self) -> list[int]:
        """Return the counters, in the order of `COUNTS`."""
        counts = [getattr(self.hot if name in ("polls", "resolved") else self, name) for name in self.COUNTS]
        counts[0] += sum(queue.enqueued for queue in list(self.opened))  # `submitted` has those of retired queues only
        return counts

    def inline(self, queue: Ring) -> int:
        """Query a queue for an await that begins. Return how many operations were resolved.

        All awaits of one turn together resolve at most `MOST_PER_TURN` operations.
        """
        left = MOST_PER_TURN - self.hot.turn.inlined
        if left <= 0:
            return 0
        resolved = queue.poll(left)
        if resolved:
            self.hot.turn.has_inlined(resolved)
        return resolved

    # -- the rule of waits: see `_wait_rule` -------------------------------------------------------------------------

    def plan(self, queue: Ring, queried: bool = False) -> None:
        """Poll or park a queue for the operation that is awaited; stop attending it if there is none.

        Called when an operation gets a waiter, when the operations of the queue have changed, and, with ``queried``,
        after a query. A plan for the same operation stays; a query only sets the time of the next one.
        """
        if self.closed:
            return
        operation, predicted, repeats = queue.outlook.find(queue)
        if operation is None or operation.status == LANDING:
            self.stop_attending(queue)  # `StreamQueue.copied_out` ends an operation in LANDING: no query does
            return
        watch = queue.watch
        if watch.attended and watch.target == operation.id:  # the wait goes on
            if not watch.polling and queried:
                self._park(queue, operation)
            elif not watch.polling and watch.armed is None:
                self._arm(queue, operation)  # but keep the time of the next query: awaits must not put it off
            return
        self.hot.attended[queue] = None
        watch.attended = True
        watch.parked = False
        watch.target = operation.id
        watch.predicted = predicted or 0.0
        watch.repeats = repeats
        now = watch.since = self.device_state.driver.now()
        watch.poll_until = first_poll(self.device_state.policy, now, predicted)
        watch.polling = now < watch.poll_until
        if watch.polling:
            self._spin_soon()
        else:
            self._park(queue, operation)

    def _spin_soon(self) -> None:
        """Have the loop call `_spin_once` in its next turn, unless it will do so already."""
        if not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin_once)

    def _alarmed(self, now: float) -> None:
        """Query the parked queues that are due, or begin to poll them."""
        early = self.alarm.early
        reached = max(now + early, self.alarm.reached)  # what is due by then: the alarm rings early on purpose
        shortest = step(len(self.hot.attended))
        # Until ``quiet_from``, queries beside armed callbacks are put off: callbacks have come just now, so the driver
        # is not held up. While callbacks count as late, this shows nothing: they may have come together, after a delay.
        quiet_from = self._last_notified + shortest + early if now >= self._held_up_until else -math.inf
        due, following = self.hot.due(reached, quiet_from, OVERDUE + early, shortest)
        unarmed: list[Ring] = []
        armed: list[Ring] = []
        for queue in due:
            watch = queue.watch
            if now < watch.poll_until:  # `_look_later` has set the time of a poll, not of a single query
                watch.polling = True
                self.sleeps += 1
                self._spin_soon()
            elif watch.armed is None:
                unarmed.append(queue)
            else:
                armed.append(queue)
        if len(armed) > MOST_CHECKED and now >= self._held_up_until:  # a few at a time, unless callbacks are late
            armed, put_off = _in_turn(armed, now)
            for queue in put_off:
                queue.watch.poll_from += shortest
                following = min(following, queue.watch.poll_from)
        if following < math.inf:
            self.alarm.set(following, now)
        if unarmed or armed:
            try:
                self._check(unarmed + armed, now)
            except BaseException:  # Ctrl-C: the queues that were not queried are still due
                self.alarm.set(now + SHORTEST, now)
                raise

    def _check(self, queues: list[Ring], now: float) -> None:
        """Query parked queues for which no tag has come, and plan anew or set the time of the next query."""
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in queues:
                armed = queue.watch.armed
                resolved = queue.poll(budget, awaited=True) if budget > 0 else 0
                budget -= resolved
                if resolved and armed is not None and armed.is_settled:
                    armed.found_at = now  # `_on_port` compares it with the time of the tag
                if resolved or (armed is None and self.device_state.tokens):  # a notifier has become free for it
                    if queue.watch.attended and (budget > 0 or not self._polls_next_turn(queue)):
                        self.plan(queue, queried=True)
                elif queue.watch.attended:
                    self._look_later(queue, now)

    def _spin_once(self) -> None:
        """Call `_spin`. If it is interrupted, call it again in the next turn."""
        self._spinning = False
        try:
            self._spin()
        except BaseException:  # Ctrl-C: the loop may be run again
            self._spin_soon()
            raise

    def _spin(self) -> None:
        """Query each polled queue once. Call `_spin_soon` if any is still polled."""
        budget = MOST_PER_TURN
        again = beside = False  # beside: a queue was polled beside its notifier, which `PollAllowance` limits
        now = self.device_state.driver.now()
        may_poll = self.poll_allowance.is_left(now)
        with self.query_guard:
            for queue in tuple(self.hot.attended):
                watch = queue.watch
                if not watch.polling:
                    continue
                if budget <= 0:
                    again = True
                    break
                beside = beside or watch.parked
                resolved = queue.poll(budget, awaited=True)
                budget -= resolved
                if (
                    resolved and budget > 0
                ):  # without budget, more may be done: it stays polled, and the next turn plans
                    if queue in self.hot.attended:
                        self.plan(queue)  # it is polled on if only operations before the awaited one were done
                elif not resolved and (now >= watch.poll_until or (watch.parked and not may_poll)):
                    watch.polling = False
                    if queue in self.hot.attended:
                        awaited, _, _ = queue.outlook.find(queue)
                        self._park(queue, awaited)
                again = again or watch.polling
        if beside:
            self.poll_allowance.spend(now, self.device_state.driver.now())
        if again:
            self._spin_soon()

    def _park(self, queue: Ring, operation: StreamOperation[Any] | None) -> None:
        """Arm a notifier for the awaited operation. Until its tag comes, have the alarm query the queue."""
        if operation is None:
            self.stop_attending(queue)
            return
        self._arm(queue, operation)
        if self.closed or self.hot.faulted:  # since `_arm` called the driver
            return
        queue.watch.parked = True
        self._look_later(queue, self.device_state.driver.now())

    def _look_later(self, queue: Ring, now: float) -> None:
        """Set the alarm for the next query of a parked queue, which has just been queried; or begin to poll it."""
        watch = queue.watch
        watch.looked = now
        polls = self.poll_allowance.is_left(now)
        held_up = now < self._held_up_until
        begin, watch.poll_until = next_look(
            self.device_state.policy, watch, now, polls=polls, held_up=held_up, waits=len(self.hot.attended)
        )
        if begin <= now:
            watch.polling = True
            self._spin_soon()
            return
        # The alarm rings ``early`` seconds ahead, so that a poll begins in time. A single query must not come early.
        watch.poll_from = begin if watch.poll_until else begin + self.alarm.early
        self.alarm.set(watch.poll_from, now)

    def _arm(self, queue: Ring, operation: StreamOperation[Any]) -> None:
        """Arm a notifier for the operation, unless one is armed for it or for an earlier one of the stream."""
        watch = queue.watch
        if watch.armed is not None and watch.armed.id <= operation.id:
            return
        try:
            driver = self.device_state.driver
            armed = self.notifier_pool.arm(driver, queue, operation, self.device_state.tokens)
            if armed is not None:
                watch.armed = armed
                self.parks += 1
        except DeviceFault as fault:
            self.device_state.driver.blame(operation.shown_name)
            self.fault(fault, operation)
        except AiocudaError as error:
            self.report_refusal(error)  # without a notifier, the alarm queries

    # -- wake-ups ------------------------------------------------------------------------------------------------

    def _pool_of_waits(self) -> NotifierPool | None:
        """Return the notifiers of the `EventWatch` that this loop has for this device, which becomes the guest.

        Return None if there is none, or if its notifiers cannot be shared.
        """
        state = self.device_state
        watch = WATCHES.get((id(self.loop), id(state.driver), state.device))
        if watch is None or state.tokens is not state.budget.tokens:  # this device arms no notifiers
            return None
        pool = watch.join(self)
        self.guest = None if pool is None else watch
        return pool

    def admit(self, watch: EventWatch) -> bool:
        """Let a watch of `aiocuda.wait` use the notifiers, until `leave`. Return False if they cannot be shared."""
        state = self.device_state
        if self.closed or self.guest is not None or self._descriptor is None or state.tokens is not state.budget.tokens:
            return False
        self.guest = watch
        return True

    def leave(self, watch: EventWatch) -> None:
        """Forget a watch: it has ended."""
        if self.guest is watch:
            self.guest = None

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
        """Handle the tags in the port: finish the jobs, and query the queues whose notifiers have come."""
        if self.closed:
            return
        queues: dict[Ring, None] = {}
        ended: dict[Ring, None] = {}
        found = math.inf  # the earliest time at which a query had found one of the ends
        tags = self._tags
        tags[:0] = self.notifier_pool.port.drain()[::-1]  # `pop` takes the oldest, which is the last
        try:
            while tags:
                tag = tags.pop()
                self.notifications += 1
                if tag & JOB:
                    self.guard(self.jobs.finished, tag)
                    continue
                armed = self.notifier_pool.disarm(tag, self.device_state.tokens)
                if armed is not None and armed.queue.reactor is self:
                    found = min(found, armed.found_at)
                    self._forget(armed)
                    (ended if armed.is_settled else queues)[armed.queue] = None
                elif armed is not None and self.guest is not None:  # which has armed it
                    self.guest.notified((armed,))
        finally:
            if tags:  # Ctrl-C has interrupted it
                self.loop.call_soon(self._on_port)
        if queues or ended:
            self._last_notified = self.device_state.driver.now()
            if self._last_notified - found > LATE_SECONDS:
                self._held_up_until = self._last_notified + HELD_UP_SECONDS
            for queue in ended:  # a query has found this end before. The next wait may need a notifier
                if queue.watch.attended and not queue.watch.polling:
                    self.plan(queue)
            self._look(queues)

    def _forget(self, armed: ArmedNotifier) -> None:
        """Note that a notifier is not armed any more. One that was armed later for an earlier operation stays."""
        if armed.queue.watch.armed is armed:
            armed.queue.watch.armed = None

    def _look(self, queues: dict[Ring, None]) -> None:
        """Query queues whose notifiers have come, and plan anew; poll those in the next turn that the budget leaves."""
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in queues:
                if budget > 0:
                    budget -= queue.poll(budget, awaited=True)
                if budget <= 0:
                    self._polls_next_turn(queue)
                elif queue.watch.attended:
                    self.plan(queue, queried=True)

    def _polls_next_turn(self, queue: Ring) -> bool:
        """Poll the queue in the next turn if it is attended: the budget is spent. Return whether it is attended."""
        if not queue.watch.attended:
            return False
        queue.watch.polling = True
        self._spin_soon()
        return True

    def _set_watchdog(self) -> None:
        """Set the timer of the next pass. `LoopWatch` reports a blocked loop if the timer is late."""
        # In an empty context: what the watchdog logs concerns no single task.
        self._watchdog = self.loop.call_later(WATCHDOG_SECONDS, self._watch, context=Context())
        if self._loop_watch is not None:
            self._loop_watch.expect(WATCHDOG_SECONDS)

    def _watch(self) -> None:
        """Do one pass of the watchdog: find ends and faults without notifications, and lost notifiers."""
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
                self._loop_watch.rest()  # no timer is expected

    def watch_again(self) -> None:
        """Let the watchdog do another pass, also if there is no queue then."""
        if self._watchdog is None and not self.closed:
            self._set_watchdog()

    def _watched_now(self) -> list[Ring]:
        """Return the queues for this pass of the watchdog: all, or the next `MOST_PER_WATCH`."""
        queues = list(itertools.islice(self.queues, MOST_PER_WATCH))
        if len(queues) < len(self.queues):
            for queue in queues:
                del self.queues[queue]
                self.queues[queue] = None  # at the end, so that the next pass takes others
        return queues

    def _look_at_everything(self) -> None:
        """Query the queues of this pass, and submit from their host queues; find a fault, and lost notifiers."""
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in self._watched_now():
                # `is_stuck` is one query, `poll` two or more. With a spent budget, each queue still resolves one.
                resolved = 0 if queue.rare.is_stuck() else queue.poll(max(budget, 1))
                budget -= resolved
                queue.rare.pump()
                if queue.idle:
                    self.deactivate(queue)
                elif (resolved or not queue.watch.attended) and (budget > 0 or not self._polls_next_turn(queue)):
                    self.plan(queue)
        fault = self.device_state.driver.fault
        if fault is not None and not self.hot.faulted:
            self.fault(fault)
        for armed in self.notifier_pool.tick(self.device_state.tokens):
            self.lost_wakes += 1
            self._forget(armed)
            if armed.found_at < math.inf:  # no tag has come for so long: callbacks are held up
                self._held_up_until = self.device_state.driver.now() + HELD_UP_SECONDS
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
        fault = self.device_state.driver.fault or fault  # the driver's is the first one, with what `blame` has added
        was_known, failed = self.hot.faulted, self.failed
        self.fail_all(fault)
        if self.loop.is_closed():
            return
        for reactor in [known() for known in list(reactors_of(self.device_state.driver))]:
            if reactor is not None and reactor.loop is self.loop and not (reactor.hot.faulted or reactor.closed):
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
        self.hot.faulted = True
        for queue in list(self.queues):
            queue.rare.fail_all(fault)
            self.deactivate(queue)
            queue.watch.armed = None
        self.notifier_pool.forget_armed(self.device_state.tokens)

    def guard(self, work: Callable[..., object], *arguments: object) -> None:
        """Call a function. No task waits for it: the loop's exception handler gets its error, and `fault` its fault."""
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
        """Stop watching: the device is being closed, or the loop is. Waiters of jobs and idle moments get an error.

        The notifiers go to the next loop, or to the waits of this loop that need no device.
        """
        if self.closed:
            return
        self.closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._loop_watch is not None:
            self._loop_watch.rest()
        self.alarm.close()
        finishers = [*self.idle_moments.close(), *self.jobs.close()]
        if not self.loop.is_closed():  # a closed loop can wake no waiter
            if self._descriptor is not None:
                self.loop.remove_reader(self._descriptor)
            for finish in finishers:
                self.guard(finish)
        guest, self.guest = self.guest, None
        if guest is None or self.loop.is_closed():
            self.notifier_pool.give(self.device_state.driver, self.device_state.tokens)
        else:
            guest.take_over()


def _in_turn(queues: list[Ring], now: float) -> tuple[list[Ring], list[Ring]]:
    """Return the queues to query now and those to put off. The ones that were queried the longest ago come first."""
    queues.sort(key=lambda queue: queue.watch.looked)
    late = queues[MOST_CHECKED:]
    # A wait that has taken long is due rarely, so it is not put off.
    put_off = [queue for queue in late if now - queue.watch.since < MOST_CHECKED_SECONDS]
    return [queue for queue in queues if queue not in put_off], put_off
