"""LoopState: everything that one event loop has on a device; LoopStates: those of all loops of one device."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from .._base._failure import Failure, raisable
from .._base._log import log
from .._core import Ring, StreamOperation
from ..completion._advice import QueueWatch, RoundTripWatch
from ..completion._device_state import DeviceState
from ..completion._idle_moment import IDLE_SECONDS, log_not_idle
from ..completion._jobs import Finish
from ..completion._reactor import Reactor
from ..completion._submission import submitting
from ..errors import ClosedError
from ..kernels import Kernel
from ..memory._allocator import DeviceMemory
from ..memory._pinned import PinnedBuffer, PinnedPool
from ..memory._region import Region
from ..memory._staging import StagingBuffers
from ._ping import PingStream

__all__ = ["TICK", "LoadGate", "LoopState", "LoopStates", "WorkSource"]

T = TypeVar("T")

#: Seconds between two looks at other loops, running or closed.
TICK = 0.001

#: Seconds for which the load of kernels waits for an idle moment: it would wait for every running kernel, and hold the
#: launches of all threads meanwhile.
LOAD_PATIENCE = 0.05

#: Objects whose memory a device may still use when it was left. They stay until the process ends.
_parked: list[object] = []


class WorkSource(Protocol):
    """A coordinator: it may have accepted operations that no stream has yet. The device's close waits for these."""

    def refuse(self) -> None:
        """Refuse new work. Any thread."""

    def moving(self) -> bool:
        """True if it will enqueue operations without a task having to do something first. Any thread."""

    def leave(self) -> None:
        """Withdraw the operations that no stream has. Only on its own loop."""


class LoadGate:
    """The gate of launches whose kernel is being compiled, if need be, and loaded at an idle moment."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._loaded = False
        self._waiting: dict[Ring, None] = {}

    def wanted_by(self, queue: Ring) -> LoadGate:
        """Wake this queue when the kernel is loaded."""
        self._waiting[queue] = None
        return self

    def open(self, error: BaseException | None) -> None:
        """Let the launches run, or fail: the kernel is loaded, or could not be."""
        self._loaded = True
        self._error = error
        for queue in self._waiting:
            queue.rare.host_queue.pump()
            queue.attend()

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """True once the kernel is loaded. Raises the error of a load that failed."""
        if self._error is not None:
            raise raisable(self._error)
        return self._loaded

    def failure(self) -> Failure | None:
        return None  # `ready` raises the error of the load


class LoopState:
    """Everything that one event loop has on a device."""

    __slots__ = (
        *("_ping_stream", "_queue_watch", "_sources", "loading", "queues", "reactor", "round_trip_watch", "staging"),
    )  # fmt: skip

    def __init__(self, reactor: Reactor, staging: StagingBuffers) -> None:
        self.reactor = reactor
        self.staging = staging  #: pinned memory for staged copies
        #: The open streams. A dict and not a set, so that a simulation visits them in the same order each time.
        self.queues: dict[Ring, None] = {}
        self.loading: dict[Kernel, LoadGate] = {}  #: kernels that worker threads are loading for this loop
        #: Finds slow ways to use the streams. Made in the first pass of the watchdog; None if that is disabled, or if
        #: the time is simulated.
        self.round_trip_watch: RoundTripWatch | None = None
        self._queue_watch: QueueWatch | None = None
        self._ping_stream: PingStream | None = None
        self._sources: dict[weakref.ref[WorkSource], None] = {}  # a source that is collected removes itself

    def begin_advice(self) -> None:
        """Look for slow ways to use the streams, in each pass of the watchdog."""
        reactor = self.reactor
        self.staging.begin_advice()
        if not reactor.device_state.asynchronous:
            return  # all streams are one, and the program waits more
        reactor.sweeps += (self._advise,)

    def _advise(self) -> None:
        if self.round_trip_watch is None or self._queue_watch is None:  # not earlier: many loops never need them
            self.round_trip_watch, self._queue_watch = RoundTripWatch(), QueueWatch()
        self.round_trip_watch.look(self.reactor)
        self._queue_watch.look(self.reactor)

    def ping_stream(self, open_queue: Callable[[], Ring]) -> PingStream:
        """Return the stream of `Device.ping` in this loop, which the first call opens."""
        if self._ping_stream is None:
            self._ping_stream = PingStream(open_queue())
        return self._ping_stream

    def add_source(self, source: WorkSource) -> None:
        """Register a coordinator that uses this loop. Closing the device closes it."""
        self._sources[weakref.ref(source, lambda gone: self._sources.pop(gone, None))] = None

    def sources(self) -> list[WorkSource]:
        """Return the registered coordinators that are still in use, in the order of registration."""
        return [source for known in list(self._sources) if (source := known()) is not None]

    def load(self, kernel: Kernel) -> LoadGate:
        """Return the gate of launches of this kernel, which is not loaded yet. Starts to load it if nothing has."""
        gate = self.loading.get(kernel)
        if gate is None:
            gate = opened = LoadGate()
            context, began = contextvars.copy_context(), time.monotonic()

            def finished(result: None, error: BaseException | None) -> None:
                self.loading.pop(kernel, None)
                opened.open(error)
                if error is None:
                    self.report_loaded(kernel, time.monotonic() - began, context)

            self.start_load((kernel,), finished)
            self.loading[kernel] = gate
        return gate

    async def load_all(self, kernels: Sequence[Kernel]) -> None:
        """Load kernels that are not loaded yet, and wait for that. Cancelling the wait does not stop it."""
        began = time.monotonic()
        await self.reactor.jobs.wait(functools.partial(self.start_load, kernels))
        for kernel in kernels:
            self.report_loaded(kernel, time.monotonic() - began)

    def start_load(self, kernels: Sequence[Kernel], finish: Finish[None]) -> None:
        """Compile kernels if need be, then load them all at one idle moment; then call ``finish`` on the loop."""
        reactor, driver, device = self.reactor, self.reactor.device_state.driver, self.reactor.device_state.device

        def compile() -> None:
            for kernel in kernels:
                kernel.program(driver, device)

        def load() -> None:
            for kernel in kernels:
                kernel.load(driver, device)

        def compiled(result: None, error: BaseException | None) -> None:
            if error is None:
                reactor.idle_moments.start(load, lambda result, error, was_idle: finish(result, error), LOAD_PATIENCE)
            else:
                finish(None, error)

        if driver.wants_image:
            reactor.jobs.start(compile, compiled)  # at once: the compiler needs no device
        else:
            compiled(None, None)

    def report_loaded(self, kernel: Kernel, seconds: float, context: contextvars.Context | None = None) -> None:
        """Log that a kernel was loaded, with the context of the task that needs it."""
        state = self.reactor.device_state
        origin = kernel.origin(state.driver, state.device)
        log(
            "info", "kernel_loaded", context, kernel=kernel.name, device=state.properties.name, origin=origin,
            seconds=round(seconds, 4),
        )  # fmt: skip

    async def offload(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn(*args)`` on a worker thread, with the context variables of this task. See `Device.offload`."""
        context = contextvars.copy_context()
        return await self.reactor.jobs.run(functools.partial(context.run, fn, *args))

    def refuse(self) -> None:
        """Refuse new work of streams and coordinators. Any thread. Accepted work goes on."""
        for source in self.sources():
            source.refuse()
        for queue in tuple(self.queues):
            if not queue.closed:
                queue.rare.refuse(draining=True)

    @property
    def expects_work(self) -> bool:
        """True if a coordinator will enqueue operations that it has accepted, although its streams are idle now."""
        loop = self.reactor.loop
        return loop.is_running() and any(source.moving() for source in self.sources())

    def blocking(self) -> bool:
        """True while a worker thread runs a job of this loop, or a job waits for its thread or for its end.

        A loop that does not run ends no job, and looks for no idle moment.
        """
        reactor, runs = self.reactor, self.reactor.loop.is_running()
        return reactor.jobs.is_busy(runs) or (runs and reactor.idle_moments.is_busy)

    def close(self) -> None:
        """Wake all waiters of this loop, if it can still run them, and stop watching the device.

        Only on its own loop, unless that does not run. Memory that the device may still use stays allocated.
        """
        fault = self.reactor.device_state.driver.fault
        if fault is not None and not self.reactor.loop.is_closed():
            self.reactor.fault(fault)
        with contextlib.ExitStack() as stack:  # a hook of a listener may raise KeyboardInterrupt
            stack.callback(self.loading.clear)
            stack.callback(self.reactor.close)
            if self.round_trip_watch is not None:
                stack.callback(self.round_trip_watch.close, self.reactor)
            for queue in reversed(self.queues):
                stack.callback(lambda each: each.rare.orphan(), queue)  # it holds the queue


class LoopStates:
    """The loop states of one device, by event loop.

    A loop may be closed while its operations are in flight. The queues of its streams are orphans then: they wake no
    waiter, and what the device may still use stays allocated until the operations have passed.
    """

    __slots__ = ("_dead", "_device_state", "_ending", "_loop_states", "_memory", "_past", "_pinned_pool", "_reclaiming")

    def __init__(self, device_state: DeviceState, memory: DeviceMemory, pinned_pool: PinnedPool) -> None:
        self._device_state = device_state
        self._memory = memory
        self._pinned_pool = pinned_pool
        self._loop_states: dict[asyncio.AbstractEventLoop, LoopState] = {}
        #: Loop states of closed loops; their queues are orphans. Their staging buffers are freed once these passed.
        self._dead: dict[LoopState, None] = {}
        self._ending = threading.RLock()  # a loop state enters `_dead` when it has been closed, and not before
        self._reclaiming = threading.Lock()
        self._past = [0] * len(Reactor.COUNTS)

    def exporting(self) -> LoopState:
        """Return the state of the running loop, or of the loop that calls a submitted function now."""
        return self.here(submitting.loop)

    def here(self, submitting: asyncio.AbstractEventLoop | None = None) -> LoopState:
        """Return the running loop's state; the first call in a loop makes it."""
        loop = asyncio._get_running_loop() or submitting
        if loop is None:
            raise self._device_state.wrong_loop(None, "the device", "use it in one")
        loop_state = self._loop_states.get(loop)
        if loop_state is None:
            self.reclaim()
            reactor = Reactor(self._device_state, loop)
            loop_state = self._loop_states[loop] = LoopState(reactor, StagingBuffers(reactor, self._pinned_pool))
            reactor.sweeps = (self.reclaim, functools.partial(self._memory.sweep, reactor), self._pinned_pool.sweep)
            if self._device_state.advises and self._device_state.driver.now is time.monotonic:
                loop_state.begin_advice()
        return loop_state

    def get(self, loop: asyncio.AbstractEventLoop) -> LoopState | None:
        """Return a loop's state, or None if it has none."""
        return self._loop_states.get(loop)

    def lists(self, queue: Ring) -> bool:
        """True until the queue's stream is destroyed, or its loop's state has ended."""
        loop_state = self._loop_states.get(queue.loop)
        return loop_state is not None and queue in loop_state.queues

    def forget(self, queue: Ring) -> bool:
        """Remove a queue, whose stream is about to be destroyed. Return False if `lists` is."""
        loop_state = self._loop_states.get(queue.loop)
        if loop_state is None or queue not in loop_state.queues:
            return False
        del loop_state.queues[queue]
        return True

    def __iter__(self) -> Iterator[LoopState]:
        return iter(list(self._loop_states.values()))

    def end(self, loop_state: LoopState) -> None:
        """Close a loop state: in its own loop if that runs, in this one otherwise."""
        loop = loop_state.reactor.loop
        if loop.is_running() and loop is not asyncio._get_running_loop():
            try:
                loop.call_soon_threadsafe(self._end, loop_state)
            except RuntimeError:
                if not loop.is_closed():
                    raise
            else:
                return
        self._end(loop_state)

    def _end(self, loop_state: LoopState) -> None:
        if self._loop_states.pop(loop_state.reactor.loop, None) is None:
            return  # it has ended
        loop_state.close()
        for position, value in enumerate(loop_state.reactor.counts()):
            self._past[position] += value

    def abandon(self) -> None:
        """Leave the device at work: wake all waiters, and keep what the device may use until the process ends."""
        for loop_state in self:
            self.park(loop_state)
            self.end(loop_state)
        _parked.extend(self._dead)

    def park(self, thing: object) -> None:
        """Keep an object until the process ends: the device may use its memory, and nothing watches it any more."""
        _parked.append(thing)

    async def unpin(self, buffer: PinnedBuffer, region: Region, reactor: Reactor) -> None:
        """Unlock an array that `Device.pin` has locked, once no device uses it any more, at an idle moment."""
        block, driver = buffer._block, self._device_state.driver
        assert block is not None
        block.retire()
        try:
            for queue, operation in list(block.uses.items()):
                if not operation.is_settled and queue.loop is reactor.loop:
                    await queue.rare.settle()
            while block.unfinished() and not (reactor.closed or driver.fault):  # noqa: ASYNC110 - other loops use it too
                await asyncio.sleep(TICK)
        except asyncio.CancelledError:
            self.park(region)
            raise
        if driver.fault is not None:
            return
        if block.unfinished():
            self.park(region)
            raise ClosedError("the device was left while it used a pinned array: that stays locked, and in use")
        try:
            own = Reactor(self._device_state, reactor.loop) if reactor.closed else reactor
        except ClosedError:
            return  # the driver was closed with its device, and has unlocked all memory
        self.park(region)  # until it is unlocked: the loop may be closed before

        def unlock() -> None:
            region.unlock(driver)
            _parked.remove(region)

        try:
            _, was_idle = await own.idle_moments.run(unlock, IDLE_SECONDS)
            if not was_idle:
                log_not_idle(self._device_state, "pin")
        finally:
            if own is not reactor:
                own.close()

    def reclaim(self) -> bool:
        """Free what closed loops do not need any more; True when nothing of them is left."""
        # Not `items()`: the collector may run while its tuples are made, and then other threads.
        for loop in list(self._loop_states):
            if loop.is_closed():
                self._bury(loop)  # a new loop may get the same port
        if not self._reclaiming.acquire(blocking=False):
            return False  # another loop does the same just now
        try:
            for loop_state in list(self._dead):
                loop_state.reactor.guard(self._reclaim, loop_state)
        finally:
            self._reclaiming.release()
        with self._ending:  # another thread may be closing a loop state
            return not self._dead

    def _bury(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close a closed loop's state. Other threads that find the loop closed wait until this is done."""
        with self._ending:
            loop_state = self._loop_states.get(loop)
            if loop_state is not None:
                try:
                    self._end(loop_state)
                finally:
                    self._dead[loop_state] = None

    def _reclaim(self, loop_state: LoopState) -> None:
        for queue in list(loop_state.queues):
            if queue.rare.has_device_finished():
                del loop_state.queues[queue]  # first: a stream that the driver refuses is not offered to it again
                self._memory.release(queue)
                queue.rare.reclaim()
        if not loop_state.queues and not loop_state.blocking():
            self._dead.pop(loop_state, None)
            loop_state.staging.close()

    def busy_here(self) -> bool:
        """True if a stream of the running loop has unfinished operations."""
        loop_state = self._loop_states.get(asyncio.get_running_loop())
        return loop_state is not None and any(not queue.idle for queue in loop_state.queues)

    def expect_work(self) -> bool:
        """True if a coordinator of any loop will enqueue operations that it has accepted."""
        return any(loop_state.expects_work for loop_state in self)

    def busy_elsewhere(self) -> bool:
        """True if streams of other loops have unfinished operations. Of loops that have stopped, ask the driver."""
        here = asyncio._get_running_loop()
        return any(
            not queue.idle if loop_state.reactor.loop.is_running() else not queue.rare.has_device_finished()
            for loop_state in self
            if loop_state.reactor.loop is not here
            for queue in list(loop_state.queues)
        )

    def unfinished_operation(self) -> StreamOperation[Any] | None:
        """Return the newest operation of some stream that is not known to have finished, or None."""
        return next(
            (tail for loop_state in self for queue in list(loop_state.queues) if (tail := queue.tail()) is not None),
            None,
        )

    def blocking(self) -> bool:
        """True while a worker thread runs a job of any loop."""
        return any(loop_state.blocking() for loop_state in self)

    def unfinished(self) -> bool:
        """True if the device has unfinished work of any loop. Asks the driver, and wakes no waiter."""
        return any(
            not queue.rare.has_device_finished()
            for loop_state in [*self, *self._dead]
            for queue in list(loop_state.queues)
        )

    def counts(self) -> dict[str, int]:
        """Return the statistics of all reactors of the device, summed by name; those of closed loops, too."""
        totals = list(self._past)
        for loop_state in self:
            for position, value in enumerate(loop_state.reactor.counts()):
                totals[position] += value
        armed = sum(len(loop_state.reactor.notifier_pool.armed) for loop_state in self)
        return dict(zip(Reactor.COUNTS, totals, strict=True)) | {"armed": armed}
