"""Reactor: watches the stream queues of one event loop on one device.

It has one poller, one port, one alarm and one watchdog, for any number of streams and waiters. Each queue with a waiter
is polled, or parked: `_wait_rule` says when. An operation is resolved only after a query.
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
        if self._device_state.hot.guarded and not self.open:
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
            self.end()

    def end(self) -> None:
        """End the driver's ``begin_queries``. A refusal is reported: no operation has caused it."""
        try:
            self._device_state.driver.end_queries()
        except DeviceFault:
            pass  # as at the beginning
        except AiocudaError as error:
            self._reactor.report_refusal(error)


class PollAllowance:
    """The time that a loop may poll beside armed host callbacks: a share of each second, for all streams together.

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
        """Return whether the loop may poll now."""
        return self._share >= 1.0 or (self._share > 0.0 and self._full_at - now < BURST / (1.0 - BURST))

    def spend(self, began: float, ended: float) -> None:
        """Count a pass of polls between two times, and the turn of the loop that it belongs to."""
        if self._share > 0.0:
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
        Made when streams wait for each other on the host.
    notifier_pool : NotifierPool
    guest : EventWatch or None
        The watch of `aiocuda.wait` on this device, which uses the notifiers, too, and takes them over at the end.
    jobs : Jobs
    idle_moments : IdleMoments
    alarm : Alarm
        Of the next query of a parked stream.
    poll_allowance : PollAllowance
    sweeps : tuple of callables
        Called in each pass of the watchdog. Finalisers leave their memory to them.
    """

    #: The names of the counters.
    COUNTS = (
        *("submitted", "resolved", "failed", "abandoned", "polls", "sleeps", "parks"),
        *("notifications", "watchdog_wakes", "lost_wakes"),
    )

    __slots__ = ("__weakref__", "_complained", "_descriptor", "_heard", "_held_up_until", "_loop_watch", "_spinning",
                 "_tags", "_watchdog", "abandoned", "alarm", "closed", "device_state", "failed", "guest", "hot",
                 "idle_moments", "jobs", "loop", "lost_wakes", "notifications", "notifier_pool", "opened", "orphans",
                 "parks", "poll_allowance", "pumps", "query_guard", "queues", "sleeps", "submission_pace", "submitted",
                 "sweeps", "wakes", "watchdog_wakes")  # fmt: skip

    def __init__(self, device_state: DeviceState, loop: asyncio.AbstractEventLoop) -> None:
        self.device_state = device_state
        self.loop = loop
        self.hot = ReactorHot(loop, device_state.driver.now)
        self.closed = False
        self.query_guard = QueryGuard(self)
        # Dictionaries instead of sets: a simulation visits their keys in the same order in every process.
        self.queues: dict[Ring, None] = {}
        self._tags: list[int] = []  # that have come and were not handled yet; the oldest is the last
        self._spinning = False
        self._heard = -math.inf  # the time of the last notification of an operation
        self._held_up_until = -math.inf  # a query has found an end before its callback
        self._watchdog: asyncio.TimerHandle | None = None
        # A simulated loop does not run in real time.
        self._loop_watch = LoopWatch.of(loop) if device_state.driver.now is time.monotonic else None
        if self._loop_watch is not None:
            self._loop_watch.calls.add(WaitingCalls.of(device_state.driver))
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

    def add(self, queue: Ring) -> None:
        """Count the operations of a new queue."""
        self.opened[queue] = None

    def activate(self, queue: Ring) -> None:
        """Watch a queue with unfinished operations. The watchdog deactivates it when it is idle."""
        queue.set_active(True)
        self.queues[queue] = None
        self.device_state.look_for_others()
        self.watch_again()

    def deactivate(self, queue: Ring) -> None:
        """Stop watching an idle queue."""
        queue.set_active(False)
        self.queues.pop(queue, None)
        self.stop_attending(queue)

    def stop_attending(self, queue: Ring) -> None:
        """Drop the plan of a queue: none of its operations has a waiter any more."""
        self.hot.attended.pop(queue, None)
        queue.watch.attended = queue.watch.polling = False

    def retire(self, queue: Ring) -> None:
        """Stop watching a closed queue. Its number of operations stays in the totals of the reactor."""
        if queue in self.opened:
            del self.opened[queue]
            self.submitted += queue.enqueued
        if queue.pending:
            self.orphans[queue] = None  # first: another thread may ask `is_idle`
        self.deactivate(queue)

    def is_idle(self) -> bool:
        """Return whether the device has finished all operations of this loop. From any thread.

        A loop that runs sees that itself; for others the driver is queried.
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
        counts[0] += sum(queue.enqueued for queue in list(self.opened))
        return counts

    def inline(self, queue: Ring) -> int:
        """Poll for an await that begins. All awaits of one turn together resolve at most `MOST_PER_TURN` operations."""
        left = MOST_PER_TURN - self.hot.turn.inlined
        if left <= 0:
            return 0
        resolved = queue.poll(left)
        if resolved:
            self.hot.turn.has_inlined(resolved)
        return resolved

    # -- the rule of waits: see `_wait_rule` -------------------------------------------------------------------------

    def plan(self, queue: Ring, queried: bool = False) -> None:
        """Decide how to wait for a queue: when an operation gets a waiter, after a change, or after a query."""
        if self.closed:
            return
        operation, predicted, repeats = queue.outlook.find(queue)
        if operation is None or operation.status == LANDING:
            self.stop_attending(queue)  # the end of a copy-out comes through `StreamQueue.copied_out`
            return
        watch = queue.watch
        if watch.attended and watch.target == operation.id:  # the wait goes on
            if not watch.polling and queried:
                self._park(queue, operation)
            elif not watch.polling and watch.armed is None:
                self._arm(queue, operation)  # the time of the next query stays: awaits must not put it off
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
        if not self._spinning:
            self._spinning = True
            self.loop.call_soon(self._spin_once)

    def _alarmed(self, now: float) -> None:
        """Query the parked queues that are due, or begin to poll them."""
        early = self.alarm.early
        reached = max(now + early, self.alarm.reached)
        shortest = step(len(self.hot.attended))
        # Callbacks that come together after a delay are no sign that the other streams are quiet.
        quiet_from = self._heard + shortest + early if now >= self._held_up_until else -math.inf
        due, following = self.hot.due(reached, quiet_from, OVERDUE + early, shortest)
        checked: list[Ring] = []
        armed: list[Ring] = []
        for queue in due:
            watch = queue.watch
            if now < watch.poll_until:
                watch.polling = True
                self.sleeps += 1
                self._spin_soon()
            elif watch.armed is None:
                checked.append(queue)
            else:
                armed.append(queue)
        if len(armed) > MOST_CHECKED and now >= self._held_up_until:
            armed, put_off = _in_turn(armed, now)
            for queue in put_off:
                queue.watch.poll_from += shortest
                following = min(following, queue.watch.poll_from)
        if following < math.inf:
            self.alarm.set(following, now)
        if checked or armed:
            try:
                self._check(checked + armed, now)
            except BaseException:  # Ctrl-C: the others are still due
                self.alarm.set(now + SHORTEST, now)
                raise

    def _check(self, queues: list[Ring], now: float) -> None:
        """Query parked queues that no callback has woken the loop for."""
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in queues:
                armed = queue.watch.armed
                resolved = queue.poll(budget, awaited=True) if budget > 0 else 0
                budget -= resolved
                if resolved and armed is not None and armed.is_settled:
                    armed.found_at = now  # before its tag has come: see `_on_port`
                if resolved or (armed is None and self.device_state.tokens):
                    if queue.watch.attended and (budget > 0 or not self._goes_on(queue)):
                        self.plan(queue, queried=True)
                elif queue.watch.attended:
                    self._look_later(queue, now)

    def _spin_once(self) -> None:
        self._spinning = False
        try:
            self._spin()
        except BaseException:  # Ctrl-C: the polls go on if the loop does
            self._spin_soon()
            raise

    def _spin(self) -> None:
        """Query each queue that is polled once; repeat in the next turn of the loop while there are any."""
        budget = MOST_PER_TURN
        again = beside = False
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
                if resolved and budget > 0:
                    if queue in self.hot.attended:
                        self.plan(queue)  # the poll goes on if the wait does: an earlier operation had a waiter, too
                elif not resolved and (now >= watch.poll_until or (watch.parked and not may_poll)):
                    watch.polling = False
                    if queue in self.hot.attended:
                        self._park(queue, queue.outlook.find(queue)[0])
                again = again or watch.polling
        if beside:
            self.poll_allowance.spend(now, self.device_state.driver.now())
        if again:
            self._spin_soon()

    def _park(self, queue: Ring, operation: StreamOperation[Any] | None) -> None:
        """Wait for a notification of the awaited operation, and have the alarm query the queue in between."""
        if operation is None:
            self.stop_attending(queue)
            return
        self._arm(queue, operation)
        if self.closed or self.hot.faulted:
            return
        queue.watch.parked = True
        self._look_later(queue, self.device_state.driver.now())

    def _look_later(self, queue: Ring, now: float) -> None:
        """Set the time of the next query of a parked queue, which has been queried now."""
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
        # The alarm comes earlier by its own lateness. A single query needs no lead.
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
            self.device_state.driver.blame(queue.rare.name_awaited())
            self.fault(fault, operation)
        except AiocudaError as error:
            self.report_refusal(error)  # without a notifier, the alarm queries

    # -- wake-ups ------------------------------------------------------------------------------------------------

    def _pool_of_waits(self) -> NotifierPool | None:
        """Return the notifiers of the watch of `aiocuda.wait`, which becomes a guest; None if they cannot be shared."""
        state = self.device_state
        watch = WATCHES.get((id(self.loop), id(state.driver), state.device))
        if watch is None or state.tokens is not state.budget.tokens:
            return None
        pool = watch.join(self)
        self.guest = None if pool is None else watch
        return pool

    def admit(self, watch: EventWatch) -> bool:
        """Let a watch use the notifiers, until `leave`. Return False if they cannot be shared."""
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
        """Handle the tags in the port: of notifiers, and of finished jobs."""
        if self.closed:
            return
        queues: dict[Ring, None] = {}
        ended: dict[Ring, None] = {}
        found = math.inf
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
                    found = min(found, armed.found_at)
                    self._forget(armed)
                    (ended if armed.is_settled else queues)[armed.queue] = None
                elif armed is not None and self.guest is not None:
                    self.guest.heard((armed,))
        finally:
            if tags:  # interrupted
                self.loop.call_soon(self._on_port)
        if queues or ended:
            self._heard = self.device_state.driver.now()
            if self._heard - found > LATE_SECONDS:
                self._held_up_until = self._heard + HELD_UP_SECONDS
            for queue in ended:  # a query has found the end before: only the next wait needs a notifier
                if queue.watch.attended and not queue.watch.polling:
                    self.plan(queue)
            self._look(queues)

    def _forget(self, armed: ArmedNotifier) -> None:
        """Note that a notifier is not armed any more. Its queue may have armed another one for an earlier operation."""
        if armed.queue.watch.armed is armed:
            armed.queue.watch.armed = None

    def _look(self, queues: dict[Ring, None]) -> None:
        """Poll the queues, and make new plans for them."""
        budget = MOST_PER_TURN
        with self.query_guard:
            for queue in queues:
                if budget > 0:
                    budget -= queue.poll(budget, awaited=True)
                if queue.watch.attended and (budget > 0 or not self._goes_on(queue)):
                    self.plan(queue, queried=True)

    def _goes_on(self, queue: Ring) -> bool:
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

    def _watched_now(self) -> list[Ring]:
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
                resolved = 0 if queue.rare.is_stuck() else queue.poll(max(budget, 1))
                budget -= resolved
                queue.rare.pump()
                if queue.idle:
                    self.deactivate(queue)
                elif (resolved or not queue.watch.attended) and (budget > 0 or not self._goes_on(queue)):
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
        fault = self.device_state.driver.fault or fault
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
        """Stop watching: the device ends, or its loop has ended. Waiters of jobs and of idle moments get an error.

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
        if not self.loop.is_closed():
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
    """Return the queues of armed waits that are queried now, and those that are put off: the ones queried last."""
    queues.sort(key=lambda queue: queue.watch.looked)
    late = queues[MOST_CHECKED:]
    put_off = [queue for queue in late if now - queue.watch.since < MOST_CHECKED_SECONDS]
    return [queue for queue in queues if queue not in put_off], put_off
