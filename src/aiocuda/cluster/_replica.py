"""Replica: one replica, as the cluster sees it; its restarts, and the tasks that wait for its changes."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._base._log import log
from .._base._tasks import start_task
from .._base._wakeups import Waiters, Wakes, wake_future
from .._processes._failures import text_of
from ..errors import DeviceFault, ReplicaLostError
from ._engine import Engine
from ._messages import Body, Cancel, Create, Packet, Probe, RemoteError, Reply, Request, Run, Watch, exception_of
from ._statistics import CallMeter, MethodTimes, ReplicaState, ReplicaStatistics

__all__ = ["Changes", "Program", "Replica", "Restarts", "retrieve"]

#: Seconds between two probes, and the number of unanswered ones after which a replica is lost.
PROBE_INTERVAL = 0.5
MOST_UNANSWERED = 4

#: The same number while an object is created: to import a library or to load a model may hold the GIL for seconds.
MOST_UNANSWERED_CREATING = 60

#: Restarts are counted over this number of seconds.
WINDOW = 60.0

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0


class Program(NamedTuple):
    """A class with its arguments, which each replica creates, and creates again after a restart."""

    number: int
    name: str  #: of the class
    data: bytes  #: pickled
    buffers: list[memoryview]


class Restarts:
    """The restarts of one replica.

    Parameters
    ----------
    limit
        The most restarts in 60 seconds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque()

    def delay(self, now: float) -> float | None:
        """Return the seconds to wait before the next restart, which is counted; None if the limit is reached.

        It is 0.1 s after 60 s without a restart, and doubles with each restart in them, up to 5 s.
        """
        times = self._times
        while times and now - times[0] >= WINDOW:
            times.popleft()
        if len(times) >= self._limit:
            return None
        delay = min(FIRST_DELAY * 2.0 ** min(len(times), 10), LONGEST_DELAY)
        times.append(now + delay)
        return delay


class Changes:
    """Tasks that wait for another state of any replica."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wakes = Wakes.of(loop)
        self._waiters: Waiters[asyncio.Future[None]] = Waiters()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self) -> None:
        """Wait for the next change."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def notify(self) -> None:
        """Wake all tasks, at most 256 in one iteration of the loop."""
        woken, self._waiters = self._waiters, Waiters()
        self._wakes.wake_all(woken, wake_future)


class Replica:
    """One replica, as the cluster sees it: it starts its process, probes it, sends calls, and starts it again.

    Each process of a replica is one epoch. A reply of an earlier epoch is ignored.

    Parameters
    ----------
    index
    engine
    programs
        The objects that each process creates, by number.
    times
        The measured times of calls to all replicas.
    changes
        Notified when the state changes.
    restarts
        The most restarts in 60 seconds.
    """

    def __init__(
        self, index: int, engine: Engine, programs: Mapping[int, Program], times: MethodTimes, changes: Changes,
        restarts: int,
    ) -> None:  # fmt: skip
        self.index = index
        self.epoch = 0
        self.state: ReplicaState = "starting"
        self._work = 0.0  # predicted seconds of the calls that it is running
        self._engine = engine
        self._programs = programs
        self._times = times
        self._changes = changes
        self._restarts = Restarts(restarts)
        self._loop = asyncio.get_running_loop()
        self._wakes = Wakes.of(self._loop)
        self._meter = CallMeter()
        self._restarted = 0
        self._last_loss: str | None = None
        # of this epoch:
        self._lost: asyncio.Future[None] = self._loop.create_future()  # set when it is lost
        self._error = ReplicaLostError("", replica=index, epoch=0, reason="")  # of the loss
        self._waiting: Waiters[asyncio.Future[Packet]] = Waiters()  # for replies
        self._ids = itertools.count()
        self._settled: list[int] = []  # ids that the replica may forget
        self._cancelled: list[int] = []  # ids of cancelled calls that the replica does not know of yet
        self._answered = True  # a probe, since the last one was sent
        self._creating = 0  # objects: a constructor may block the loop of the replica
        # of all epochs:
        self._new: set[int] = set()  # numbers of objects that `spawn` creates
        self._blamed: set[int] = set()  # those that it was creating at a loss
        self._counts = True  # the last loss counts towards the limit of restarts

    # -- life ----------------------------------------------------------------------------------------------------

    async def run(self, started: asyncio.Future[None]) -> None:
        """Start the replica, and start it again after each loss until the limit of restarts is reached.

        Parameters
        ----------
        started
            Set when the first process has started, or fails with its error; then this returns.
        """
        while True:
            self._begin_epoch()
            try:
                await self._engine.spawn(self.index, self.epoch)
                async with asyncio.TaskGroup() as group:
                    start_task(self._probe, group=group)
                    await self._create_all()
                    if self._lost.done():  # just after its last answer
                        raise self._error.again()
                    self._set_state("running")
                    if started.done():
                        log("info", "replica_restarted", replica=self.index, epoch=self.epoch)
                    else:
                        started.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised by `open_cluster`, or counted as a loss
                if isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
                    error = error.exceptions[0]
                if not started.done():
                    started.set_exception(error)
                    self._set_state("stopped")
                    return
                self._lose(f"it did not start: {text_of(error)}")
            await self._engine.close(self.index)
            delay = self._restarts.delay(self._loop.time()) if self._counts else FIRST_DELAY
            if delay is None:
                self._set_state("stopped")
                log("error", "replica_stopped", replica=self.index, epoch=self.epoch, reason=self._last_loss)
                return
            await asyncio.sleep(delay)
            self._restarted += 1

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._lost = self._loop.create_future()
        self._waiting = Waiters()
        self._ids = itertools.count()
        self._settled = []
        self._cancelled = []
        self._creating = 0

    async def _create_all(self) -> None:
        for program in tuple(self._programs.values()):
            error = await self.create(program)
            if error is not None:
                raise error

    async def _probe(self) -> None:
        """Send probes until the replica is lost."""
        epoch = self.epoch
        self._call(Watch()).add_done_callback(functools.partial(self._on_fault, epoch))
        unanswered = 0
        while not self._lost.done():
            self._answered = False
            self._call(Probe()).add_done_callback(functools.partial(self._on_probe, epoch))
            # By ticks and not by the clock: if another callback has blocked this loop for seconds, the replies are read
            # in the next tick.
            await asyncio.wait({self._lost}, timeout=PROBE_INTERVAL)
            unanswered = 0 if self._answered else unanswered + 1
            most = MOST_UNANSWERED_CREATING if self._creating else MOST_UNANSWERED
            if unanswered >= most:
                self._lose(
                    f"it has answered no probe for {most * PROBE_INTERVAL:g} s. The usual reasons are code that blocks "
                    "its event loop (use a plain method, or asyncio.to_thread), and code that holds the GIL"
                )

    def _on_probe(self, epoch: int, answer: asyncio.Future[Packet]) -> None:
        if answer.cancelled() or answer.exception() is not None or epoch != self.epoch:
            return
        self._answered = True
        self._look_for_fault(answer.result().message)

    def _on_fault(self, epoch: int, answer: asyncio.Future[Packet]) -> None:
        if not answer.cancelled() and answer.exception() is None and epoch == self.epoch:
            self._look_for_fault(answer.result().message)

    def _look_for_fault(self, reply: Reply) -> bool:
        """True if the replica has reported a fault, which ends it."""
        if not reply.fault or reply.failure is None:
            return False
        error = reply.failure.load()
        self._lose(f"its device has faulted: {reply.failure.text}", error if isinstance(error, DeviceFault) else None)
        return True

    def on_lost(self, epoch: int, reason: str) -> None:
        """Its process has ended by itself. Called by the engine."""
        if epoch == self.epoch:
            self._lose(reason)

    def _lose(self, reason: str, fault: DeviceFault | None = None) -> None:
        """Fail all calls of this epoch, and ignore its replies from now on. Idempotent."""
        if self._lost.done():
            return
        log(
            "warning", "replica_lost", replica=self.index, epoch=self.epoch, reason=reason,
            in_flight=self._meter.in_flight,
        )  # fmt: skip
        self._last_loss = reason
        # An object that ends each replica must not stop the objects that it has. At its second loss, a replica is to
        # blame.
        self._counts = self._new <= self._blamed
        self._blamed |= self._new
        self._fail_waiting(reason, fault)
        if self.state == "running":
            self._set_state("restarting")

    def _fail_waiting(self, reason: str, fault: DeviceFault | None = None) -> None:
        self._error = ReplicaLostError(
            f"replica {self.index} was lost: {reason}", replica=self.index, epoch=self.epoch, reason=reason
        )
        self._error.__cause__ = fault
        self._lost.set_result(None)
        waiting, self._waiting = self._waiting, Waiters()
        self._wakes.wake_all(waiting, functools.partial(_fail, self._error))

    def _set_state(self, state: ReplicaState) -> None:
        self.state = state
        self._changes.notify()

    def stop(self) -> None:
        """The cluster is closed: fail what still waits for a reply."""
        if not self._lost.done():
            self._fail_waiting("the cluster was closed")
        self._set_state("stopped")

    # -- requests ------------------------------------------------------------------------------------------------

    async def create(self, program: Program) -> Exception | None:
        """Create an object. Return the exception of its class, which may itself be a `ReplicaLostError`.

        Raises
        ------
        ReplicaLostError
            The replica was lost before the reply arrived.
        """
        self._creating += 1
        epoch = self.epoch
        if program.number not in self._programs:
            self._new.add(program.number)
        try:
            reply: Reply = (await self._ask(Create(program.number, program.data), program.buffers)).message
            self._answered = True
        finally:
            self._new.discard(program.number)
            if epoch == self.epoch:
                self._creating -= 1
        if reply.failure is None:
            return None
        return exception_of(reply.failure, f"{program.name}() of replica {self.index}")

    async def call(self, number: int, method: str, data: bytes, buffers: Sequence[memoryview]) -> Packet:
        """Run a method, and return the reply, for `result_of`.

        The exception of a method may be a `ReplicaLostError`, too, of another cluster: this raises only its own.

        Raises
        ------
        ReplicaLostError
            The replica was lost before the reply arrived.
        """
        meter, epoch, identity = self._meter, self.epoch, next(self._ids)
        work = self._times.predicted(number, method)
        self._work += work
        meter.begin()
        began = self._loop.time()
        try:
            packet = await self._ask(Run(identity, number, method, data), buffers, identity)
        except ReplicaLostError:
            meter.lose()
            raise
        except asyncio.CancelledError:
            if epoch == self.epoch and not self._lost.done():
                self._cancel(identity)
            raise
        finally:
            meter.end()
            self._work = self._work - work if meter.in_flight else 0.0
        reply: Reply = packet.message
        meter.reply(self._loop.time() - began, failed=reply.failure is not None)
        if reply.failure is None:
            self._times.note(number, method, reply.seconds)
        return packet

    def result_of(self, packet: Packet, name: str, method: str) -> Any:
        """Return the result in a reply. Raise the exception of the method, or `RemoteError`."""
        reply: Reply = packet.message
        where = f"{name}.{method}() of replica {self.index}"
        if reply.failure is not None:
            raise exception_of(reply.failure, where)
        assert reply.result is not None
        try:
            return packet.load(reply.result)
        except Exception as error:
            text = text_of(error)
            raise RemoteError(
                f"the result of {where} cannot be loaded: {text}",
                type_name=type(error).__name__,
                text=text,
                traceback="",
            ) from error

    async def _ask(self, body: Body, buffers: Sequence[memoryview] = (), identity: int | None = None) -> Packet:
        """Send a request of this epoch, and return the reply. `ReplicaLostError` if there is none."""
        if self._lost.done():
            raise self._error.again()
        outer: asyncio.Future[Packet] = self._loop.create_future()
        waiting = self._waiting
        waiting.add(outer)
        inner = self._call(body, buffers)
        inner.add_done_callback(functools.partial(self._on_reply, outer, self.epoch, identity))
        try:
            return await outer
        finally:
            waiting.discard(outer)
            inner.cancel()
            retrieve(outer)  # a cancellation may have come after the loss

    def _call(self, body: Body, buffers: Sequence[memoryview] = ()) -> asyncio.Future[Packet]:
        settled, self._settled = tuple(self._settled), []
        call = self._engine.call(self.index, Packet(Request(self.epoch, body, settled), buffers))
        call.add_done_callback(retrieve)
        return call

    def _on_reply(
        self, outer: asyncio.Future[Packet], epoch: int, identity: int | None, inner: asyncio.Future[Packet]
    ) -> None:
        if epoch != self.epoch or self._lost.done():
            return  # a late reply: the loss has failed the call
        if inner.cancelled():
            return  # settled when the replica has answered the `Cancel`: it must find the call
        if identity is not None:
            self._settle(epoch, identity)
        if outer.done():
            return
        error = inner.exception()
        if isinstance(error, OSError):
            self._lose(f"its connection has failed: {text_of(error)}")
        elif error is not None:
            outer.set_exception(error)
        elif inner.result().message.epoch != epoch or not inner.result().message.accepted:
            self._lose("another process has answered in its place")
        elif not self._look_for_fault(inner.result().message):
            outer.set_result(inner.result())

    def _cancel(self, identity: int) -> None:
        """Cancel a call in the replica, with all others that are cancelled in this iteration of the loop."""
        if not self._cancelled:
            self._loop.call_soon(self._send_cancelled, self.epoch)
        self._cancelled.append(identity)

    def _send_cancelled(self, epoch: int) -> None:
        if epoch != self.epoch or self._lost.done():
            return
        ids, self._cancelled = tuple(self._cancelled), []

        def settle(answer: asyncio.Future[Packet]) -> None:
            for identity in ids:
                self._settle(epoch, identity)

        self._call(Cancel(ids)).add_done_callback(settle)

    def _settle(self, epoch: int, identity: int) -> None:
        """Let the replica forget a call, with the next request."""
        if epoch == self.epoch:
            self._settled.append(identity)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def load(self) -> tuple[float, int]:
        """The predicted seconds of the calls that it is running; then, for a tie, the number of calls so far."""
        return self._work, self._meter.calls

    def statistics(self) -> ReplicaStatistics:
        """Return a snapshot."""
        meter = self._meter
        p50, p99 = meter.percentiles()
        return ReplicaStatistics(
            index=self.index, state=self.state, epoch=self.epoch, calls=meter.calls, answered=meter.answered,
            failed=meter.failed, lost=meter.lost, in_flight=meter.in_flight, latency_p50_s=p50, latency_p99_s=p99,
            restarts=self._restarted, last_loss=self._last_loss,
        )  # fmt: skip


def _fail(error: ReplicaLostError, waiter: asyncio.Future[Packet]) -> None:
    if not waiter.done():
        waiter.set_exception(error.again())


def retrieve(reply: asyncio.Future[Any]) -> None:
    """Mark the exception of a reply as seen: its waiter may be gone."""
    if reply.done() and not reply.cancelled():
        reply.exception()
