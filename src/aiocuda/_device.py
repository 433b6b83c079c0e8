"""Device: where streams and memory come from, and where everything ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ._checks import is_function
from ._instrument import Instrument
from ._loop_state import TICK, LoopState, LoopStates
from ._mistakes import lacks
from ._shutdown import Patience, at_exit, to_the_end, wait_at_most, warn_of_the_rest
from ._statistics import DeviceStatistics
from ._types import DeviceProperties, Priority, ProcessLocal, caller
from .completion._device_state import DeviceState
from .completion._operation import STEP, Operation
from .completion._policy import CompletionPolicy
from .completion._reactor import Reactor
from .completion._stream_queue import StreamQueue
from .driver.protocol import Driver
from .errors import (
    AiocudaError,
    BusyError,
    ClosedError,
    InvalidArgumentError,
    InvalidTypeError,
)
from .graph import Capture, Graphs
from .graph._captured import Captured
from .interchange._exports import Exports
from .interchange._foreign import ForeignMemory
from .interchange._host_arrays import as_source, as_target
from .interchange._streams import StreamImports
from .kernels import Kernel
from .memory._allocator import DeviceMemory
from .memory._arrays import as_dtype, as_shape
from .memory._host_writes import HOST_WRITES
from .memory._pinned import PinnedBuffer, PinnedPool
from .memory._unified import UnifiedBuffer
from .stream import CheckedStream, Checker, Stream, _closing

__all__ = ["Device"]

T = TypeVar("T")

#: Seconds that leaving a device by an exception gives the work that it has already accepted.
DRAIN_TIMEOUT = 5.0

_PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")


_DRAIN = "`await device.drain()` waits for all its work, `await stream.synchronize()` for that of a stream"
_UPLOAD = "`await stream.upload(array)` makes a buffer of an array"


@lacks(
    synchronize=_DRAIN,
    sync=_DRAIN,
    create_stream="device.stream() makes a stream",
    Stream="device.stream() makes a stream",
    upload=_UPLOAD,
    to_device=_UPLOAD,
    empty="stream.empty(shape, dtype) makes a buffer",
    allocate="stream.empty(shape, dtype) makes a buffer",
    mem_info="device.memory.statistics() has the figures",
    close="`await device.aclose()` closes it, or `async with aiocuda.open_device() as device`",
)
class Device(ProcessLocal):
    """One GPU, or the host in its place.

    Made by `open_device`. Several loops in several threads may share it; each makes streams of its own.

    Attributes
    ----------
    driver : Driver
    index : int
    properties : DeviceProperties
    memory : DeviceMemory
    checker : aiocuda.stream.Checker or None
    asynchronous : bool
    drain_timeout : float
        Seconds that leaving by an exception, or the interpreter's exit, gives what the device has accepted.
    """

    def __init__(
        self, driver: Driver, index: int, properties: DeviceProperties, policy: CompletionPolicy, max_in_flight: int,
        owns_driver: bool, opened_at: str, asynchronous: bool,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.index = index
        self.properties = properties
        self.asynchronous = asynchronous
        self.drain_timeout = DRAIN_TIMEOUT
        self._device_state = DeviceState(driver, index, properties, policy, max_in_flight, asynchronous)
        self._imports = StreamImports(
            self._device_state, lambda: self._loop_states, functools.partial(_closing.forget_dropped, self)
        )
        exports = Exports(self._device_state, self._imports.queue_of)
        self._pinned = PinnedPool(self._device_state, exports)
        self.memory = DeviceMemory(
            self._device_state,
            self,
            exports,
            ForeignMemory(self._device_state, self, exports, self._pinned),
            reactor=self._reactor,
            known_reactor=self._known_reactor,
            newest_unfinished=self._newest_unfinished,
        )
        self._graphs = Graphs(self._device_state)
        self._loading: dict[Any, Any] = {}
        self._loop_states = LoopStates(self._device_state, self.memory, self._pinned, self._loading)
        self._targets = HOST_WRITES
        self._names = itertools.count()
        self._owns_driver = owns_driver
        self._opened_at = opened_at
        self._streams_before = driver.statistics()["streams_created"]
        #: Looks for accesses that nothing puts in order; None unless the device was opened with ``check=True``.
        self.checker: Checker | None = None
        self.closed = self._closing = self._giving_back = False
        self._patience = Patience(self)
        at_exit(self)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The device's own name."""
        return self.properties.name

    @property
    def hardware_queues(self) -> int:
        """How many streams can be served without sharing a queue (``CUDA_DEVICE_MAX_CONNECTIONS``)."""
        return self.properties.hardware_queues

    @property
    def policy(self) -> CompletionPolicy:
        """When waits poll, sleep or park."""
        return self._device_state.policy

    # -- streams -------------------------------------------------------------------------------------------------

    def stream(self, priority: Priority = "normal", name: str | None = None) -> Stream:
        """A new stream, for the running loop. ``cuStreamCreateWithPriority``; or the default one, see `open_device`.

        Parameters
        ----------
        priority
            ``"high"``, ``"normal"`` or ``"low"``, mapped on the device's own range. The device starts work of a higher
            priority first once an engine is free; it does not interrupt what runs.
        name
            How it shows in reports and errors.
        """
        if not isinstance(priority, str) or priority not in _PRIORITIES:
            raise InvalidArgumentError(f"priority must be 'high', 'normal' or 'low', not {priority!r}")
        if name is not None and not isinstance(name, str):
            raise InvalidTypeError(f"a stream's name is a string, not {name!r}")
        return self._open_stream(self._loop_state(), priority, name, caller(2))

    def _open_stream(self, loop_state: LoopState, priority: Priority, name: str | None, opened_at: str) -> Stream:
        """The same, also while the device closes: then for what was accepted before."""
        handle = self._device_state.make_stream(priority)
        queue = StreamQueue(loop_state.reactor, handle, name or f"stream-{next(self._names)}")
        loop_state.queues[queue] = None
        self._device_state.stream_opened(1)
        if self._closing:
            queue.refuse(draining=True)
        return self._face(queue, priority, opened_at)

    def _face(self, queue: StreamQueue, priority: Priority, opened_at: str) -> Stream:
        if self.checker is not None:
            return CheckedStream(self, queue, priority, opened_at, self.checker)
        return Stream(self, queue, priority, opened_at)

    async def load(self, kernel: Kernel) -> None:
        """Compile a kernel if need be, and load it, so that no launch of it waits for that.

        Nothing needs it but a launch on a stream that others use too, where nothing may wait: see `Stream.from_handle`.
        """
        if not isinstance(kernel, Kernel):
            raise InvalidTypeError(f"load takes an aiocuda.Kernel, not {type(kernel).__name__}")
        await self._loop_state().reactor.jobs.run(lambda: kernel.load(self.driver, self.index))

    def _capture(self, stream: Stream) -> Capture:
        """`Stream.capture`, which stands below graphs."""
        return Capture(self, stream)

    def _capture_too(self, stream: Stream, operation: Operation[Any]) -> Operation[None]:
        """A stream waits for something captured: it takes part from now on."""
        assert isinstance(operation, Captured)
        return operation._recorder.wait(stream, operation)

    def _loop_state(self) -> LoopState:
        """This loop's share of the device."""
        if self.closed or self._closing:
            raise ClosedError(f"{self.name} has been closed: open it again with aiocuda.open_device()")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        return self._loop_states.here()

    def _reactor(self) -> Reactor:
        """Return the running loop's reactor; raise if the device has been closed."""
        return self._loop_state().reactor

    def _newest_unfinished(self) -> Operation[Any] | None:
        """Return an operation of any loop that the device has not finished."""
        return self._loop_states.working()

    def _known_reactor(self, loop: asyncio.AbstractEventLoop) -> Reactor | None:
        """Return a loop's reactor, if the loop has used the device."""
        loop_state = self._loop_states.get(loop)
        return None if loop_state is None else loop_state.reactor

    # -- host memory and threads ---------------------------------------------------------------------------------

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> PinnedBuffer:
        """Page-locked host memory as a NumPy array. It may be awaited until it is locked; copies wait by themselves."""
        kind = as_dtype(dtype)
        return self._pinned.buffer(self._loop_state().reactor, as_shape(shape, kind.itemsize), kind)

    @contextlib.asynccontextmanager
    async def pin(self, array: npt.NDArray[Any]) -> AsyncIterator[PinnedBuffer]:
        """Page-lock an array of your own for direct DMA, as long as the block lasts. ``cuMemHostRegister``.

        The block's end waits until no device uses the array any more, whatever is cancelled meanwhile.
        """
        if not isinstance(array, np.ndarray):
            raise InvalidTypeError(f"only a NumPy array can be pinned, not {type(array).__name__}")
        checked = as_target(array) if array.flags.writeable else as_source(array)
        reactor = self._loop_state().reactor
        buffer, region = self._pinned.borrow(checked)
        try:
            await to_the_end(reactor.jobs.run(lambda: region.lock(self.driver)))
            yield buffer
        finally:
            if region.locked:
                await to_the_end(self._loop_states.unpin(buffer, region, reactor))
            elif reactor.closed:
                self._loop_states.park(region)  # a thread may be locking it just now

    def unified(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> UnifiedBuffer:
        """Managed memory, uninitialised: one address for the host and the device. ``cuMemAllocManaged``.

        What is given back is kept for the next one of its size, up to 256 MiB.

        Raises
        ------
        UnsupportedError
            The device has none: ask ``device.properties.managed_memory`` first.
        DeviceOutOfMemory
            No room.
        """
        reactor = self._loop_state().reactor
        kind = as_dtype(dtype)
        return self.memory.managed.buffer(reactor, as_shape(shape, kind.itemsize), kind)

    async def offload(self, fn: Callable[..., T], *args: Any) -> T:
        """``fn(*args)``, which may block, on one of the device's worker threads, with this task's context variables.

        The caller gets any exception of the function, as the same object. `KeyboardInterrupt` and `SystemExit` also
        leave the event loop, as from a task. A `CancelledError` or `StopIteration` of the function becomes a
        `RuntimeError` whose ``__cause__`` it is.

        Cancelling the wait does not stop the function: it runs on, its result is dropped, its failure told to the loop.
        The device's end waits for it; leaving by an exception, no longer than `drain_timeout`. Copies and compilations
        need the same threads, four to eight of them: what takes long belongs elsewhere.
        """
        if not is_function(fn):
            raise InvalidTypeError(f"offload takes a function and its arguments, not {fn!r}")
        return await self._offload(self._loop_state(), fn, *args)

    async def _offload(self, loop_state: LoopState, fn: Callable[..., T], *args: Any) -> T:
        """The same, also while the device closes: then for what was accepted before."""
        context = contextvars.copy_context()
        return await loop_state.reactor.jobs.run(lambda: context.run(fn, *args))

    # -- what is known -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listen(self, instrument: Instrument) -> Iterator[None]:
        """Tell an `aiocuda._instrument.Instrument` of every operation in the block. `BusyError` if another listens."""
        if self._device_state.instrument is not None:
            raise BusyError(f"{self._device_state.instrument!r} listens to {self.name} already: leave its block first")
        self._device_state.instrument = instrument
        try:
            yield
        finally:
            self._device_state.instrument = None

    def statistics(self) -> DeviceStatistics:
        """A snapshot of all that was counted since it was opened."""
        counts = self._loop_states.counts()
        driver = self.driver.statistics()
        ended = counts["resolved"] + counts["failed"] + counts["abandoned"]
        return DeviceStatistics(
            in_flight=counts["submitted"] - ended,
            streams=self._device_state.streams,
            streams_created=driver["streams_created"] - self._streams_before,
            events=driver["events"],
            threads=driver["threads"],
            **counts,
        )

    # -- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until all that this loop's streams were given is done, failed or not."""
        loop_state = self._loop_states.get(asyncio.get_running_loop())
        if loop_state is not None:
            loop_state.reactor.guard(
                self.memory.sweep, loop_state.reactor
            )  # what others have let go of brings work of its own
            for queue in tuple(loop_state.queues):
                await queue.settle()
        while not (self._loop_states.reclaim() or self.closed or self.driver.fault):  # noqa: ASYNC110 - nobody is left to tell
            await asyncio.sleep(TICK)

    async def aclose(self) -> None:
        """Refuse new work, wait for the work that was accepted, then give everything back.

        From its first line on, all that is made for the device refuses new work with `ClosedError`, in all tasks and
        all loops: its streams, pools and coordinators, and streams of other devices that would use its memory. What was
        accepted before is done, without a limit of time: operations that wait on the host, operations that a
        coordinator has registered, functions on worker threads. Not waited for: a coordinator's operation that a task
        would have to bring first, by an event to record or a block to leave; the items of a pipeline. These fail with
        `ClosedError`. A second call waits for the first.

        A cancellation meanwhile leaves the device, as an exception leaves ``async with``: what is on the host is
        withdrawn, and what the device has accepted gets `drain_timeout` seconds.
        """
        if not self.closed:
            try:
                await self._drain_for_good()
            except BaseException:
                await self._leave()
                raise
        await self._release()

    async def _drain_for_good(self) -> None:
        """Take no new work, and wait for what there is, in other loops too."""
        self._refuse()
        await self.drain()
        await self._device_state.settle()
        loop_states = self._loop_states
        while not (self.closed or self.driver.fault):
            if not loop_states.busy_here():  # what one queue let go of may have been an event behind another one's end
                if not (
                    loop_states.busy_elsewhere()
                    or loop_states.blocking()
                    or loop_states.feeding()
                    or self._device_state.is_lent()
                ):
                    break
                await asyncio.sleep(TICK)
            await self.drain()

    def _refuse(self) -> None:
        """Take no new work. In this order: what refuses first must not find anything else still open."""
        self._closing = True
        self._device_state.recall()
        for loop_state in self._loop_states:
            loop_state.refuse()

    async def _leave(self) -> None:
        """By an exception or a cancellation: abandon what is on the host, and wait for the device, within a limit."""
        self._patience.begin()
        self._refuse()  # before any task is told that its work was withdrawn
        loop_state = self._loop_states.get(asyncio.get_running_loop())
        try:
            for feeder in () if loop_state is None else loop_state.feeders():
                feeder.leave()
            for queue in () if loop_state is None else tuple(loop_state.queues):
                queue.withdraw_all()
            ended, cancelled = await wait_at_most(self._patience.left(), self._drain_for_good())
        except BaseException:  # Ctrl-C in the midst of it, or the end itself failed: nobody waits any more
            self._abandon()
            raise
        if ended == "done":
            await self._release()
        else:
            queues = () if loop_state is None else loop_state.queues
            unfinished = sum(operation.kind is not STEP for queue in queues for operation in queue.pending)
            self._abandon()
            warn_of_the_rest(self.name, unfinished, f"within {self.drain_timeout} s" * (ended == "late"))
        if cancelled is not None:
            raise cancelled

    async def _release(self) -> None:
        """Everything has passed: streams, memory, events, notifiers go back."""
        if not self.closed:
            self.closed = self._giving_back = True
            try:
                await to_the_end(self._give_back())
            finally:
                self._giving_back = False
        while self._giving_back:  # noqa: ASYNC110 - another task, or another loop
            await asyncio.sleep(TICK)

    async def _give_back(self) -> None:
        here = self._loop_states.here()  # made anew in a loop that has not used the device
        loop_states = list(self._loop_states)
        if self.driver.fault is None:
            for loop_state in loop_states:
                for queue in tuple(loop_state.queues):
                    del loop_state.queues[queue]
                    _closing.destroy(self, queue)
            while self._loop_states.blocking():  # noqa: ASYNC110 - memory that is being locked
                await asyncio.sleep(TICK)
            for free in (self._graphs.close(), self.memory.close(here.reactor), self._pinned.close()):
                await here.reactor.jobs.run(free)
            self._device_state.leases.close()
        else:
            self._park()
        for loop_state in loop_states:
            self._loop_states.end(loop_state)
        self._close_driver()

    def _abandon(self) -> None:
        """The device is not done with it: nothing that it may touch is given back. Who waits for it is told."""
        self.closed = True
        self._park()
        self._loop_states.abandon()
        self._close_driver()

    def _park(self) -> None:
        self._graphs.abandon()
        self.memory.abandon()
        self._pinned.abandon()

    def _close_driver(self) -> None:
        if self._owns_driver:
            self._device_state.dismiss()
            self.driver.close()

    def _unfinished(self) -> bool:
        """Is the device still at work? For the interpreter's exit."""
        try:
            return self.driver.fault is None and self._loop_states.unfinished()
        except AiocudaError:
            return False  # its driver has been closed, or has faulted just now: there is nothing to wait for

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            warnings.warn(
                f"unclosed {self!r}, opened at {self._opened_at}: use `async with aiocuda.open_device()`, or await "
                "device.aclose()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            await self.aclose()
        elif not self.closed:
            await self._leave()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Device {self.driver.name}:{self.index} {self.name}{state}>"
