"""Structs that the core reads and writes for each operation. Other packages hold most of them."""

from __future__ import annotations

import asyncio
import math
from asyncio import _get_running_loop, current_task
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._ring import Ring

__all__ = ["Countdown", "DeviceHot", "Lease", "ReactorHot", "Turn", "Watch"]


class Lease:
    """A CUDA event. `EventLeases` lends it to an operation, which records it on a stream and gives it back at its end.

    Attributes
    ----------
    handle : int
        The event, as the methods of the driver take it.
    word : int
        The event, as the C functions of a `Native` take it; 0 until one of them has needed it.
    timing : bool
        True if the event records the time.
    home : list of Lease
        The list of idle leases that it is put back into.
    generation : int
        One more each time that the event is given back: so a user's `Event` sees that it does not have it any more.
    lent : bool
        True while a user's `Event` has it. Then the operation that has recorded it does not give it back.
    """

    __slots__ = ("generation", "handle", "home", "lent", "timing", "word")

    def __init__(self, handle: int, timing: bool, home: list[Lease]) -> None:
        self.handle = handle
        self.timing = timing
        self.home = home
        self.generation = 0
        self.lent = False
        self.word = 0


class Countdown:
    """The waiter of a `gather`: one for many operations.

    ``left`` of them have not ended yet. ``future`` is woken when all have; with ``fail_fast``, also when one fails.
    """

    __slots__ = ("fail_fast", "future", "left")

    def __init__(self, future: asyncio.Future[None], left: int, fail_fast: bool) -> None:
        self.future = future
        self.left = left
        self.fail_fast = fail_fast


#: Limits for awaits that return without suspension, one after another, before one of them yields to the loop: their
#: number, and their seconds. Where the host is slower than the device, each item of a pipeline is done when it is
#: awaited: 64 items took 10 ms.
MOST_IMMEDIATE = 64
IMMEDIATE_SECONDS = 0.001


class Turn:
    """Limits the work that awaits do without suspension in one turn of the loop, so that other tasks run, too.

    Attributes
    ----------
    immediate : int
        The number of awaits, by all tasks in this turn, whose own query has found the operation done.
    inlined : int
        The number of operations that awaits have resolved in this turn: at most `MOST_PER_TURN`.
    """

    __slots__ = ("_awaits", "_loop", "_now", "_since", "_task", "_task_since", "immediate", "inlined")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        self._loop = loop
        self._now = now
        self._since = 0.0  # the time of the first of the `immediate` awaits
        self._task: asyncio.Task[Any] | None = None  # that has awaited a finished operation last, in this turn
        self._task_since = 0.0
        self._awaits = 0  # of finished operations, by that task, since `_task_since`
        self.immediate = 0
        self.inlined = 0

    def is_over(self) -> bool:
        """Count an await whose own query has found the operation done. Return whether it has to yield to the loop."""
        now = self._now()
        if not self.immediate:
            self._since = now
            self._loop.call_soon(self._next)
        self.immediate += 1
        return self.immediate > MOST_IMMEDIATE or now - self._since > IMMEDIATE_SECONDS

    def is_over_for_task(self) -> bool:
        """Count an await of an operation that was finished before. Return whether it has to yield to the loop.

        A task has to yield only for its own awaits: `asyncio.gather` awaits each operation by a task of its own.
        """
        if _get_running_loop() is not self._loop:
            return False  # a finished operation may be awaited on another loop
        task = current_task(self._loop)
        if task is None:
            return False  # a coroutine that is stepped by hand
        now = self._now()
        if task is self._task:
            self._awaits += 1
            return self._awaits > MOST_IMMEDIATE or now - self._task_since > IMMEDIATE_SECONDS
        if self._task is None:
            self._loop.call_soon(self._forget_task)  # in the next turn
        self._task, self._task_since, self._awaits = task, now, 1
        return False

    def has_inlined(self, resolved: int) -> None:
        """Count operations that an await has resolved."""
        if not self.inlined:  # the first ones of this turn
            self._loop.call_soon(self._next)
        self.inlined += resolved

    def _next(self) -> None:
        self.immediate = self.inlined = 0

    def _forget_task(self) -> None:
        self._task = None


class Watch:
    """How the reactor waits for the awaited operation of a queue: see `aiocuda.completion._wait_rule`.

    Only the reactor writes it. A notifier is a host callback of CUDA that wakes the loop. Times are of the
    driver's clock, in seconds.

    Attributes
    ----------
    attended : bool
        True while an operation of the queue has a waiter, and the reactor has a plan for it.
    polling : bool
        True while the reactor queries the queue in each turn of the loop.
    parked : bool
        True after the first poll of the wait. From then on a notifier or the alarm ends it, and a poll only helps.
    poll_from, poll_until : float
        The time of the next query, and the end of the poll that begins then; 0.0 if it is a single query.
    target : int
        The id of the awaited operation.
    since, looked : float
        The times at which the wait began, and at which it was queried last.
    predicted : float
        The predicted end of the awaited operation; 0.0 if it is unknown.
    repeats : bool
        True if durations of its kind have repeated.
    armed : ArmedNotifier or None
        The notifier that is armed for the queue.
    """

    __slots__ = ("armed", "attended", "looked", "parked", "poll_from", "poll_until", "polling", "predicted", "repeats",
                 "since", "target")  # fmt: skip

    def __init__(self) -> None:
        self.attended = self.polling = self.parked = self.repeats = False
        self.poll_from = self.poll_until = self.since = self.looked = self.predicted = 0.0
        self.target = 0
        self.armed: Any = None


class DeviceHot:
    """What the core reads of a device for each operation. The `DeviceState` holds and writes it.

    Attributes
    ----------
    listeners : Listeners or None
        Their hooks get the submission and the end of each operation; None without a listener.
    starts : dict of int to Lease
        The timing event before each operation, by its id, while a listener wants timing.
    limit : int
        The most operations in `Ring.pending` of one stream, at present. The streams share the hardware queues.
    guarded : bool
        True if another library may be capturing a stream. Each pass of queries then begins with the driver's
        ``begin_queries``, which takes 0.8 µs.
    linger : float
        `CompletionPolicy.linger`: seconds for which an await may repeat its query before it suspends.
    idle_leases : list of Lease
        The idle events without timing, of `EventLeases`.
    """

    __slots__ = ("guarded", "idle_leases", "limit", "linger", "listeners", "starts")

    def __init__(self, limit: int, linger: float, idle_leases: list[Lease]) -> None:
        self.limit = limit
        self.linger = linger
        self.idle_leases = idle_leases
        self.guarded = False
        self.listeners: Any = None
        self.starts: dict[int, Lease] = {}


class ReactorHot:
    """What the core reads and counts of a reactor for each operation. The `Reactor` holds it.

    Attributes
    ----------
    turn : Turn
    faulted : bool
        The reactor has failed its operations because of a device fault.
    polls, resolved : int
        Counters.
    attended : dict of Ring
        The queues with a waiter.
    on_progress : callable or None
        Called after operations were resolved, while the staging buffers need it.
    """

    __slots__ = ("attended", "faulted", "on_progress", "polls", "resolved", "turn")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        self.turn = Turn(loop, now)
        self.faulted = False
        self.polls = self.resolved = 0
        self.on_progress: Callable[[], None] | None = None
        # A dictionary instead of a set: a simulation visits its keys in the same order in every process.
        self.attended: dict[Ring, None] = {}

    def due(self, reached: float, quiet_from: float, longest: float, step: float) -> tuple[list[Ring], float]:
        """Return the queues that are not polled and whose next query is due by ``reached``; and when the next one is.

        A queue with a notifier need not be queried while notifiers of other queues come: a query that is due before
        ``quiet_from`` is put off, by steps, but not for longer than ``longest`` after the queue's last query.
        """
        found: list[Ring] = []
        following = math.inf
        for queue in self.attended:
            watch = queue.watch
            if watch.polling:
                continue
            if watch.armed is not None and not watch.poll_until:  # a single query beside a notifier
                while watch.poll_from < quiet_from and watch.poll_from < watch.looked + longest:
                    watch.poll_from += step
            if watch.poll_from <= reached:
                found.append(queue)
            elif watch.poll_from < following:
                following = watch.poll_from
        return found, following
