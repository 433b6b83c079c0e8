"""StreamQueue: one stream's operations that have not finished, in order."""

from __future__ import annotations

import asyncio
import weakref
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import AiocudaError, BusyError, ClosedError
from . import _ending, _failing, _observed, _resolve
from ._extra import Land
from ._failure import Spoiled
from ._host_queue import Gate, HostQueue, Submitted
from ._operation import ABANDONED, STEP, Operation, new_operation
from ._prediction import INSTANT

if TYPE_CHECKING:
    from ._event_leases import Lease
    from ._notifiers import ArmedNotifier
    from ._prediction import Estimate
    from ._reactor import Reactor

__all__ = ["StreamQueue"]


class StreamQueue:
    """Where a stream's operations wait for the device.

    An operation that the stream has accepted stands in `pending`, with an event recorded right behind it. What the
    stream cannot take yet waits in `queue`, in front of it. Resolving goes strictly from the oldest to the newest.
    """

    __slots__ = (
        "__weakref__",
        "_driver",
        "_idle",
        "_now",
        "_record",
        "_stream",
        "active",
        "armed",
        "attended",
        "closed",
        "device_state",
        "draining",
        "ended",
        "enqueued",
        "handle",
        "host_queue",
        "imported",
        "last_busy",
        "last_resolved",
        "latencies",
        "lent",
        "live_bytes",
        "loop",
        "name",
        "peak_bytes",
        "pending",
        "poll_from",
        "poll_until",
        "polling",
        "reactor",
        "recorded",
        "resolving",
        "spoiled",
        "told_at",
        "waited",
        "watched_since",
    )

    def __init__(self, reactor: Reactor, handle: int, name: str, imported: bool = False) -> None:
        self.reactor = reactor
        self.device_state = reactor.device_state
        self.loop: asyncio.AbstractEventLoop = reactor.loop
        self._driver = reactor.device_state.driver
        # What every enqueue needs, looked up once.
        self._now = self._driver.now
        self._record = self._driver.recorder(handle)
        self._idle = reactor.device_state.leases.plain
        self.handle = handle
        self.name = name
        self.enqueued = 0
        self.waited = False  # the next operation comes right behind a wait for another stream
        self.told_at = -1  # `enqueued` when it was told to wait and no operation of its own stands for that
        self.live_bytes = self.peak_bytes = 0  # of the memory that was allocated through it
        self.imported = imported
        self.lent = 0  # to how many others at this moment
        self.recorded = False  # `Stream.capture` records its work into a graph: it takes no new operations
        self.pending: deque[Operation[Any]] = deque()
        self.host_queue = HostQueue(self)
        self.spoiled: Spoiled | None = None
        # How it ends. `refuse` is the one place where verbs begin to be refused.
        self.closed = False  # verbs are refused; what was accepted before runs on, without asking this
        self.draining = False  # closed, and a coordinator may still have accepted work for it: see `let_in`
        self.ended = False  # closed, and nobody waits for its work any more
        self._stream: weakref.ref[Any] | None = None
        #: Seconds from submit to resolve of the last operations, for statistics.
        self.latencies: deque[float] = deque(maxlen=512)
        # How the reactor watches it.
        self.resolving = False
        self.active = False
        self.attended = False
        self.polling = False
        self.poll_from = 0.0
        self.poll_until = 0.0
        self.watched_since = 0.0
        self.armed: ArmedNotifier | None = None
        reactor.opened[self] = None
        # What prediction needs: when it was last seen unfinished, and when something that takes time last finished.
        self.last_busy = 0.0
        self.last_resolved = 0.0

    fail = _failing.fail
    skip = _failing.skip
    lose = _failing.lose
    named = _failing.named
    spoil = _failing.spoil
    interrupted = _failing.interrupted
    unrecorded = _failing.unrecorded
    poll = _resolve.poll
    linger = _resolve.linger
    resolve_to = _resolve.resolve_to
    landed = _resolve.landed
    fail_all = _resolve.fail_all
    refuse = _ending.refuse
    let_in = _ending.let_in
    finish = _ending.finish
    withdraw_all = _ending.withdraw_all
    flush = _ending.flush
    settle = _ending.settle
    orphan = _ending.orphan
    passed = _ending.passed
    reclaim = _ending.reclaim

    # -- checks --------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Any:
        """The stream's public face, while anybody holds it."""
        return None if self._stream is None else self._stream()

    def face(self, stream: object) -> None:
        """The public face is made after its queue."""
        self._stream = weakref.ref(stream)

    @property
    def shared(self) -> bool:
        """May others enqueue on the stream just now? Then nothing of ours may wait in front of it."""
        return self.imported or self.lent > 0

    def check_loop(self) -> None:
        """Only the loop that a stream was made in may use it."""
        if _get_running_loop() is not self.loop:
            raise self.device_state.no_loop(self.loop, self.name, "make a stream in each loop, share the device")

    def check(self) -> None:
        """May something be enqueued now?"""
        self.check_loop()
        if self.closed:
            raise ClosedError(
                f"stream {self.name!r} has been closed, by itself or with its device: make another by device.stream()"
            )
        fault = self._driver.fault
        if fault is not None:
            raise fault.again()

    def _is_recorded(self, kind: str) -> BusyError:
        """Return the error of work that does not come by a method of the stream that records."""
        return BusyError(
            f"{self.name} is being captured, and this {kind} would run instead of being recorded: call the methods of "
            "the stream whose `capture` was called, or end the capture first"
        )

    # -- enqueue -------------------------------------------------------------------------------------------------

    def enqueue(
        self,
        kind: str,
        estimate: Estimate | None,
        call: Callable[..., object],
        arguments: tuple[Any, ...],
        keep: object = None,
    ) -> Operation[Any]:
        """Give ``call(*arguments)`` to the stream, behind all that it was given before.

        ``keep`` is held until the operation has finished.
        """
        operation: Operation[Any] = new_operation(self, kind, estimate, keep)
        self.submit(operation, call, arguments)
        return operation

    def enqueue_behind(
        self,
        kind: str,
        gate: Gate,
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        keep: object = None,
        *,
        estimate: Estimate | None = None,
        land: Land | None = None,
        value: object = None,
    ) -> Operation[Any]:
        """The same, once the gate is open; nothing that comes later overtakes it."""
        self.check()
        if self.recorded:
            raise self._is_recorded(kind)
        operation: Operation[Any] = new_operation(self, kind, INSTANT if kind == "wait" else estimate, keep)
        operation._land = land
        operation._value = value
        self.enqueued += 1
        self.host_queue.put(operation, call, arguments, gate)
        return operation

    def enqueue_record(self, lease: Lease, keep: object) -> Operation[None]:
        """Record an event that somebody else holds, behind all that the stream was given before."""
        self.check()
        operation: Operation[None] = new_operation(self, "record", INSTANT, keep)
        self.submit(operation, _lend, (operation, lease))
        return operation

    def step(
        self,
        call: Callable[..., object],
        arguments: tuple[Any, ...],
        estimate: Estimate | None,
        release: Callable[[], object],
        keep: object,
    ) -> Operation[Any]:
        """Part of the operation at the head of the queue; it does not count as one of its own.

        ``release`` is called when the device is done with it, whether it succeeded or not. ``keep`` is held until then,
        since the operation may be withdrawn before.
        """
        operation: Operation[Any] = new_operation(self, STEP, estimate, keep)
        operation._release = release
        operation._land = _at_once  # somebody waits for it: the rest of the copy
        self.submit(operation, call, arguments, ahead=True)
        return operation

    def submit(
        self,
        operation: Operation[Any],
        call: Callable[..., object] | None,
        arguments: tuple[Any, ...],
        ahead: bool = False,
    ) -> None:
        """Hand an operation to the driver, and record an event right behind it (0.24 µs, free on the GPU).

        What is new goes behind all that the stream was given before, and so into the queue if that is not empty.
        ``ahead`` of the queue goes what comes from it: its head, a step of that, a mark.
        """
        if not ahead:
            if _get_running_loop() is not self.loop or self.closed or self.reactor.faulted:
                self.check()
            if self.recorded:
                raise self._is_recorded(operation.kind)
            if self.waited and operation._estimate is not INSTANT:
                self.waited = False
                operation._estimate = None if operation._estimate is None else operation._estimate.behind_wait
            if self.host_queue.entries or self.spoiled is not None or len(self.pending) >= self.device_state.limit:
                self.enqueued += 1
                self.host_queue.put(operation, call, arguments)
                return
        if not self.active:
            self.reactor.activate(self)
        try:
            # In place before the first driver call: an interrupt in between loses nothing.
            if not ahead:
                self.enqueued += 1
            self.pending.append(operation)
            if self.device_state.instrument is not None:
                _observed.submit(self, self.device_state.instrument, operation, call, arguments)
                return
            now = self._now()
            if call is not None:
                call(*arguments)
            operation._submitted = now  # and not before: what has none was refused (see `_recorded_late`)
            lease = operation._lease
            if lease is None:
                lease = self._idle.pop() if self._idle else self.device_state.leases.take()
            try:
                self._record(lease.handle)
            except BaseException:
                self.unrecorded(operation, lease)
                raise
            operation._lease = lease
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the operation's failure
            self.fail(operation, error)
        except BaseException:
            self.interrupted(operation)
            raise

    def mark(self) -> Operation[Any]:
        """An event behind all that the stream has been given so far, for others to wait for."""
        operation: Operation[Any] = new_operation(self, STEP, INSTANT, None)
        operation._release = _ending.nothing  # by which steps are told from what counts
        self.submit(operation, None, (), ahead=True)
        return operation

    def wait(self, operation: Operation[Any]) -> Operation[Any]:
        """Later work of this stream waits, on the device, for an operation of another one of this loop."""
        waiting = self.enqueue_behind("wait", Submitted(operation, self), self._issue_wait, (operation,), operation)
        self.waited = True
        return waiting

    def follow(self, operation: Operation[Any]) -> None:
        """The same, without an operation of its own where the stream takes it at once."""
        if operation._queue is self:
            return
        lease = operation._lease  # once: where it belongs to another loop, that may take it away meanwhile
        if lease is not None and not self.host_queue.entries and self.spoiled is None:
            self.waits()
            self._driver.stream_wait(self.handle, lease.handle)
        elif not operation._passed:
            self.wait(operation)

    def waits(self) -> None:
        """It is about to be told to wait for another stream, and no operation of its own will stand for that."""
        self.waited = True
        self.told_at = self.enqueued

    def _issue_wait(self, operation: Operation[Any]) -> None:
        lease = operation._lease
        if lease is None and not operation._passed and operation._queue is not self:
            # It was skipped or withdrawn, and has no event; what stands before it in its stream may still run.
            lease = operation._queue.mark()._lease
        if lease is not None:
            self._driver.stream_wait(self.handle, lease.handle)

    def abandon(self, operation: Operation[Any]) -> None:
        """Tell everybody now. The operation keeps its place, its event and its memory until its turn comes."""
        extra = operation._extras()
        # No call in between: Ctrl-C finds it abandoned or not at all, and who is not told now is told in its turn.
        extra.abandoned = True
        operation._state = ABANDONED
        operation._value = None
        self.reactor.abandoned += operation.kind is not STEP
        operation._tell_out_of_turn()

    # -- completion ----------------------------------------------------------------------------------------------

    def attend(self) -> None:
        """Somebody waits for something in here."""
        if not self.polling:
            self.reactor.plan(self)

    def is_stuck(self) -> bool:
        """Return whether its oldest operation is known to be unfinished, by one query.

        `poll` takes two and more: it begins with the newest operation. False if the answer is not known.
        """
        lease = self.pending[0]._lease if self.pending else None
        if lease is None or self.resolving or (self.device_state.guarded and not self.reactor.query_guard.now):
            return False
        try:
            done = self._driver.event_query(lease.handle)
        except AiocudaError:
            return False  # `poll` gets the same error, and handles it
        if done:
            return False  # `poll` counts it
        self.reactor.polls += 1
        self.last_busy = self._now()
        return True

    def awaited(self) -> tuple[Operation[Any] | None, float | None, float]:
        """The oldest operation that somebody waits for, when it is likely to end, and how far off that may be.

        While something is queued, the middle of what is pending counts as waited for: the stream is refilled when
        it is half empty, whether anybody waits or not.
        """
        pending = self.pending
        refill = len(pending) // 2 if self.host_queue.entries else -1
        expected: float | None = None
        spread = 0.0
        for index, operation in enumerate(pending):
            if index == 0:
                expected = max(operation._submitted, self.last_resolved)
            estimate = operation._estimate
            seconds = None if estimate is None else estimate.seconds
            if expected is not None:
                expected = None if seconds is None else expected + seconds
                if estimate is not None and estimate.spread > spread:
                    spread = estimate.spread
            landing = operation._extra is not None and operation._extra.land is not None
            if operation._waiters is not None or landing or index == refill:
                return operation, expected, spread
        return None, None, 0.0

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing unfinished."""
        return not self.pending and not self.host_queue.entries

    def end(self) -> Operation[Any] | None:
        """What stands for all that it was given so far, waits too; None if nothing of it is left to wait for.

        With a failure that nobody has read yet the stream runs nothing: whatever waits for its end is skipped, too.
        """
        unsaid = self.told_at == self.enqueued or self.imported or self.lent  # nor is what others enqueue an operation
        if (unsaid or self.spoiled is not None) and not (self.closed or self.host_queue.entries):
            if self.spoiled is not None and not self.spoiled.delivered:
                return self.enqueue("wait", INSTANT, _ending.nothing, ())  # its tail may be a mark that says nothing
            if unsaid:
                mark = self.mark()
                self.told_at = -1  # and not before: Ctrl-C in between loses no wait
                return mark
        return self.tail()

    def tail(self) -> Operation[Any] | None:
        """The newest unfinished operation."""
        if self.host_queue.entries:
            return self.host_queue.entries[-1]
        return self.pending[-1] if self.pending else None


def _at_once(operation: Operation[Any]) -> bool:
    """Landing that takes no time."""
    return True


def _lend(operation: Operation[Any], lease: Lease) -> None:
    """The operation's event is to be this one."""
    operation._lease = lease
