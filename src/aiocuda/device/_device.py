"""Device: makes streams and memory, and closes everything at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype, as_shape
from .._base._async_block import async_block
from .._base._checks import check_integer, check_seconds, check_timeout, is_coroutine_function, is_function
from .._base._log import log
from .._base._mistakes import keywords, lacks, or_none, refuses
from .._base._owner import Outcome, Owner
from .._base._shutdown import DRAIN_TIMEOUT, finish_shielded
from .._base._statistics import DeviceStatistics
from .._base._types import DeviceProperties, Priority, SourceLine
from .._core import INTERNAL
from .._core._form import form
from ..completion._device_state import DeviceState
from ..completion._instrument import Listener
from ..completion._stream_queue import stream_queue
from ..completion._submission import SUBMIT_AHEAD
from ..completion._wait_rule import CompletionPolicy
from ..driver.protocol import Driver
from ..errors import DeviceFault, DrainTimeoutWarning, InvalidArgumentError, InvalidTypeError
from ..kernels import Kernel
from ..memory._allocator import DeviceMemory
from ..memory._pinned import PinnedBuffer
from ..memory._unified import UnifiedBuffer
from ..memory.interchange._host_arrays import as_source, as_target
from ._device_scope import DeviceScope
from ._loop_state import TICK
from ._resources import DeviceResources
from .graphs._graph import Capture
from .streams._checker import Checker
from .streams._stream import Stream, open_stream

__all__ = ["Device"]

T = TypeVar("T")

_PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")


@lacks
@refuses(__enter__="is closed by `async with`, not `with`: `async with aiocuda.open_device() as device`")
class Device(Owner):
    """One GPU, or the host in its place.

    Made by `open_device`. Several loops in several threads may share it; each makes streams of its own.
    """

    @or_none
    def __init__(
        self, driver: Driver, index: int, properties: DeviceProperties, policy: CompletionPolicy, max_in_flight: int,
        owns_driver: bool, opened_at: str, asynchronous: bool,
    ) -> None:  # fmt: skip
        if not isinstance(properties, DeviceProperties):
            raise InvalidTypeError("a device is opened: `async with aiocuda.open_device() as device`")
        self.driver = driver  #: the driver that runs it
        self.index = index  #: its number in the driver
        self.properties = properties  #: what the driver reports of it
        self.asynchronous = asynchronous  #: False if every stream is the default stream
        device_state = DeviceState(driver, index, properties, policy, max_in_flight, asynchronous)
        resources = DeviceResources(self, device_state, DRAIN_TIMEOUT, Capture)
        self.memory: DeviceMemory = resources.memory  #: its allocator
        self._owns_driver = owns_driver
        self._streams_before = driver.statistics()["streams_created"]
        self._waited_before = resources.waiting_calls.waited
        self._resources = resources
        self._scope = DeviceScope(
            repr(self), "", "open it again with aiocuda.open_device()", drain_seconds=resources.deadline.left,
            tasks=resources.functions,
        )  # fmt: skip
        use = "`async with aiocuda.open_device()`, or await device.aclose()"
        self._scope.must_end(use, opened_at, resources.is_closed)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The device's own name."""
        return self.properties.name

    @property
    def hardware_queues(self) -> int:
        """The number of streams that do not share a hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS``)."""
        return self.properties.hardware_queues

    @property
    def policy(self) -> CompletionPolicy:
        """Decides when waits poll, sleep or park."""
        return self._resources.device_state.policy

    @property
    def checker(self) -> Checker | None:
        """Finds unordered accesses; None unless the device was opened with ``check=True``.

        The devices of one driver that are open at the same time have the same one.
        """
        return self._resources.checker

    @property
    def closed(self) -> bool:
        """True once the device has been closed, or left."""
        return self._resources.closed

    @property
    def fault(self) -> DeviceFault | None:
        """The fault of the device, or None. A fault ends CUDA in the whole process, so all its devices have it.

        It is known when a call to the driver has found it, in any loop or thread. An idle device is not asked: `ping`
        asks it.
        """
        return self.driver.fault

    @property
    def drain_timeout(self) -> float:
        """Seconds to wait for accepted work after an exception, or at the interpreter's exit. Can be set."""
        return self._resources.deadline.timeout

    @drain_timeout.setter
    def drain_timeout(self, seconds: float) -> None:
        self._resources.deadline.timeout = check_seconds(seconds, "drain_timeout")

    # -- streams -------------------------------------------------------------------------------------------------

    @keywords(
        "stream takes priority=, name= and submit_ahead=",
        non_blocking="each stream is already: leave it out",
    )
    def stream(
        self, priority: Priority = "normal", name: str | None = None, submit_ahead: int = SUBMIT_AHEAD
    ) -> Stream:
        """Return a new stream, for the running loop. ``cuStreamCreateWithPriority``.

        On a device that was opened with ``asynchronous=False`` it is the default stream.

        Parameters
        ----------
        priority
            ``"high"``, ``"normal"`` or ``"low"``, mapped to the device's own range. When an engine becomes free, the
            device starts work of a higher priority first; it does not interrupt running work.
        name
            The stream's name in reports and errors.
        submit_ahead
            The most functions of `Stream.submit` whose work is on the device and unfinished; later ones wait.
        """
        check_integer(submit_ahead, "submit_ahead")
        if submit_ahead < 1:
            raise InvalidArgumentError(f"submit_ahead is at least 1, not {submit_ahead}", submit_ahead=submit_ahead)
        if not isinstance(priority, str) or priority not in _PRIORITIES:
            cure = f": device.stream(name={priority!r}) gives it a name" if isinstance(priority, str) else ""
            raise InvalidArgumentError(f"priority must be 'high', 'normal' or 'low', not {priority!r}{cure}")
        if name is not None and not isinstance(name, str):
            raise InvalidTypeError(f"a stream's name is a string, not {name!r}")
        resources = self._resources
        stream = open_stream(resources, resources.loop_state(), priority, name, str(SourceLine.of_caller()))
        stream_queue(stream).rare.submissions.most = int(submit_ahead)
        return stream

    async def load(self, *kernels: Kernel) -> None:
        """Compile kernels if need be, and load them, so that their launches do not wait for that.

        Await it before the first work of a service. The load of a kernel waits for every running kernel of the process,
        and holds the launches of all threads meanwhile. So a kernel that is loaded later, here or at its first launch,
        waits for a moment at which no operation is unfinished, for at most 50 ms.

        A launch on a stream that other libraries use, too, needs a kernel that is loaded: see `Stream.from_handle`.
        """
        for kernel in kernels:
            if not isinstance(kernel, Kernel):
                kind = type(kernel).__name__
                raise InvalidTypeError(f"load takes an aiocuda.Kernel, not {kind}: device.load(*kernels)")
        loop_state = self._resources.loop_state()
        new = [kernel for kernel in kernels if kernel.loaded(self.driver, self.index) is None]
        if new:
            await loop_state.load_all(new)

    # -- host memory and threads ---------------------------------------------------------------------------------

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> PinnedBuffer:
        """Return page-locked host memory as a NumPy array. Await it until it is locked; copies wait for that."""
        try:
            kind = as_dtype(dtype)
        except InvalidTypeError:
            if isinstance(shape, str):
                as_shape(shape)  # as in slot.pinned(name, shape): this is the error
            raise
        return self._resources.pinned_pool.buffer(self._resources.open_reactor(), as_shape(shape, kind.itemsize), kind)

    def pin(self, array: npt.NDArray[Any]) -> contextlib.AbstractAsyncContextManager[PinnedBuffer]:
        """Page-lock the caller's array for direct DMA, for the duration of the block. ``cuMemHostRegister``.

        The end of the block waits until no device uses the array any more, shielded from cancellation.

        ``cuMemHostUnregister`` then waits for every running kernel of the process, and holds the launches of all
        threads meanwhile. So the end waits, for at most a second, for an idle moment: when no operation of this process
        is unfinished on any device of the driver. After that it does not wait any more, and logs ``no_idle_moment``.
        Work of other libraries is not seen. `pinned` memory stays locked until the device is closed.
        """
        return self._pinned_array(array)

    @async_block(
        "device.pin()", "is a block, because the array is unlocked at its end: `async with device.pin(array) as pinned`"
    )
    async def _pinned_array(self, array: npt.NDArray[Any]) -> AsyncIterator[PinnedBuffer]:
        if not isinstance(array, np.ndarray):
            raise InvalidTypeError(f"only a NumPy array can be pinned, not {type(array).__name__}")
        checked = as_target(array) if array.flags.writeable else as_source(array)
        resources = self._resources
        reactor = resources.open_reactor()
        buffer, region = resources.pinned_pool.borrow(checked)
        try:
            await finish_shielded(reactor.jobs.run(lambda: region.lock(self.driver)))
            yield buffer
        finally:
            if region.locked:
                await finish_shielded(resources.loop_states.unpin(buffer, region, reactor))
            elif reactor.closed:
                resources.loop_states.park(region)  # a worker thread may be locking it just now

    def unified(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> UnifiedBuffer:
        """Return managed memory, uninitialised: one address for the host and the device. ``cuMemAllocManaged``.

        Freed memory is kept for later allocations of the same size, up to 256 MiB. Adaptors of `memory` count it.

        Raise `UnsupportedError` if ``device.properties.managed_memory`` is False, `DeviceOutOfMemory` if there is not
        enough memory.
        """
        reactor = self._resources.open_reactor()
        kind = as_dtype(dtype)
        return self.memory.unified(reactor, as_shape(shape, kind.itemsize), kind)

    async def offload(self, fn: Callable[..., T], *args: Any) -> T:
        """Run ``fn(*args)``, which may block, on a worker thread, with the context variables of this task.

        The caller gets any exception of the function, as the same object. `KeyboardInterrupt` and `SystemExit` also
        leave the event loop, as from a task. A `CancelledError` or `StopIteration` of the function becomes a
        `RuntimeError` with that exception as ``__cause__``.

        Cancelling the wait does not stop the function: it runs to its end, its result is dropped, and a failure goes to
        the loop's exception handler. `aclose` waits for it; after an exception, at most `drain_timeout` seconds. Copies
        and compilations use the same four to eight threads, so run long functions elsewhere.
        """
        if not is_function(fn):
            raise InvalidTypeError(f"offload takes a function and its arguments, not {fn!r}")
        if is_coroutine_function(fn):
            raise InvalidTypeError(f"offload takes a plain function, and {fn!r} is a coroutine function: await it here")
        return await self._resources.loop_state().offload(fn, *args)

    # -- observation ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Notify a listener of every operation of this device in the ``with`` block.

        Any number of listeners can listen at the same time. A hook runs in the event loop of the operation's stream, in
        the context of the task that enqueued the operation: its context variables are visible, also for an operation
        that has waited on the host. Hooks must return at once and must not raise: a listener that raises is removed,
        and the loop's exception handler gets the error.

        An operation is resolved once, also if it fails, is skipped, or ends by a device fault. If it never reached its
        stream, there was no ``on_submit``.

        Parameters
        ----------
        listener
            An object with one or both of the methods ``on_submit(operation)`` and ``on_resolve(operation, start, end)``
            of `aiocuda.observe.Instrument`. If its attribute ``timing`` is True when the block begins, every operation
            gets a timing event before and after it, which costs the host a few microseconds. A third method,
            ``on_batch(batch)``, is called for each batch of a `MicroBatcher` of this device: see
            `aiocuda.observe.BatchListener`.

        Raises
        ------
        InvalidTypeError
            The listener has none of the hooks.
        BusyError
            This listener listens already.
        """
        found = (getattr(listener, name, None) for name in ("on_submit", "on_resolve", "on_batch"))
        hooks = [hook for hook in found if hook is not None]
        if isinstance(listener, type) or not hooks or not all(callable(hook) for hook in hooks):
            raise InvalidTypeError(
                "a listener is an object with a method on_submit(operation), on_resolve(operation, start, end) or "
                f"on_batch(batch), not {listener!r}"
            )
        for hook in hooks:
            if is_coroutine_function(hook):
                raise InvalidTypeError(f"{hook!r} is a coroutine function, and hooks are not awaited: use a plain def")
        device_state = self._resources.device_state
        device_state.add_listener(listener)
        try:
            yield
        finally:
            device_state.remove_listener(listener)

    def statistics(self) -> DeviceStatistics:
        """Return the counts since the device was opened."""
        counts = self._resources.loop_states.counts()
        driver = self.driver.statistics()
        ended = counts["resolved"] + counts["failed"] + counts["abandoned"]
        return DeviceStatistics(
            in_flight=counts["submitted"] - ended,
            driver_calls_waited=self._resources.waiting_calls.waited - self._waited_before,
            streams=self._resources.device_state.streams,
            streams_created=driver["streams_created"] - self._streams_before,
            events=driver["events"],
            threads=driver["threads"],
            core=form().name,
            **counts,
        )

    async def ping(self, timeout_s: float | None = 1.0) -> float:
        """Wait for a sign of life of the device, and return the seconds until it came.

        The device has to reach an event on a stream that the first ping of a loop makes, and that has no other work. So
        a ping does not wait for other streams, unless the device was opened with ``asynchronous=False``. Pings that
        overlap wait for one event, also for one that an earlier ping has not seen in time.

        Parameters
        ----------
        timeout_s
            The longest wait. None for no limit.

        Raises
        ------
        TimeoutError
            The device has not answered in time. It may answer later: the next ping waits for the same event.
        DeviceFault, ClosedError
            The device has failed; it has been closed, or is being closed.
        """
        limit = check_timeout(timeout_s, "timeout_s")
        resources = self._resources
        loop_state = resources.loop_state()
        ping_stream = loop_state.ping_stream(lambda: resources.streams.open(loop_state, "high", "ping"))
        try:
            return await ping_stream.ping(limit)
        except TimeoutError:
            raise TimeoutError(f"{self.name} has not answered within {limit:g} s") from None

    # -- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until all work of this loop's streams has finished, failed or not."""
        loop_states = self._resources.loop_states
        loop_state = loop_states.get(asyncio.get_running_loop())
        if loop_state is not None:
            # First, since to free dropped memory may enqueue work.
            loop_state.reactor.guard(self.memory.sweep, loop_state.reactor)
            for queue in list(loop_state.queues):
                await queue.rare.settle()
        while not (loop_states.reclaim() or self.closed or self.driver.fault):  # noqa: ASYNC110
            await asyncio.sleep(TICK)  # closed loops set no event

    async def aclose(self) -> None:
        """Refuse new work, wait for the accepted work, then free everything.

        From the first line on, all objects of the device refuse new work with `ClosedError`, in all tasks and all
        loops: its streams, pools and coordinators, and streams of other devices that would use its memory. Accepted
        work is finished, without a limit of time: operations that wait on the host, operations that a coordinator has
        registered, functions on worker threads. Two things are not waited for, and fail with `ClosedError`: a
        coordinator's operation for which a task would have to record an event or leave a block first, and the items of
        a pipeline. A second call waits for the first.

        The device then gives back its page-locked and unified memory. These calls wait for every running kernel of the
        process, and hold the launches of all threads meanwhile: also for kernels of other devices, and of other
        libraries.

        A cancellation meanwhile leaves the device, as an exception leaves ``async with``: work on the host is
        withdrawn, and the work that the device has accepted gets `drain_timeout` seconds.

        Raises
        ------
        BusyError
            A host function of a coordinator has called it, which would wait for itself.
        """
        await self._scope.aclose(self)

    def _refuse(self) -> None:
        if not self.closed:
            self._resources.refuse()

    def _withdraw(self) -> None:
        """Abandon the work on the host of this loop, and begin the time of the rest."""
        resources = self._resources
        resources.deadline.begin()
        loop_state = resources.loop_states.get(asyncio.get_running_loop())
        for source in () if loop_state is None else loop_state.sources():
            source.leave()
        for queue in () if loop_state is None else tuple(loop_state.queues):
            queue.rare.withdraw_all()

    def _unfinished(self) -> int | None:
        return 0 if self.closed else None

    async def _drain(self) -> None:
        """Wait for the accepted work, in other loops too."""
        resources = self._resources
        await self.drain()
        await resources.device_state.settle()
        while not (self.closed or self.driver.fault):
            # Again, since one queue's last operation may have been enqueued after the end of another queue.
            if not resources.loop_states.busy_here():
                if not resources.busy_elsewhere():
                    break
                await asyncio.sleep(TICK)
            await self.drain()
        resources.memory.exports.close()  # before the next watchdog's sweep enqueues a marker

    async def _release(self, outcome: Outcome) -> None:
        if self.closed:
            return
        if outcome == "done":
            self._resources.mark_closed()
            await self._give_back()
        elif outcome == "failed":
            self._abandon()
        else:
            loop_state = self._resources.loop_states.get(asyncio.get_running_loop())
            queues = () if loop_state is None else loop_state.queues
            unfinished = sum(operation.kind is not INTERNAL for queue in queues for operation in queue.pending)
            self._abandon(unfinished)
            limit = f"within {self.drain_timeout} s" if outcome == "late" else "before the wait was interrupted"
            self._scope.place.warn(
                f"{self.name}: {unfinished} operation{'s' * (unfinished != 1)} did not finish {limit}, or threads did "
                "not; the memory that they may still touch stays allocated",
                DrainTimeoutWarning,
            )

    async def _give_back(self) -> None:
        resources = self._resources
        reactor = resources.loop_states.here().reactor  # a new one, if this loop has not used the device
        loop_states = list(resources.loop_states)
        if self.driver.fault is None:
            for loop_state in loop_states:
                for queue in list(loop_state.queues):
                    del loop_state.queues[queue]
                    resources.streams.destroy(queue)
            while resources.loop_states.blocking():  # noqa: ASYNC110 - memory that is being locked
                await asyncio.sleep(TICK)
            for free in (resources.graphs.close(), resources.memory.close(reactor), resources.pinned_pool.close()):
                await reactor.jobs.run(free)
            resources.device_state.leases.close()
        else:
            resources.abandon_memory()
        for loop_state in loop_states:
            resources.loop_states.end(loop_state)
        self._close_driver()
        log("info", "device_closed", device=self.name, index=self.index, driver=self.driver.name, unfinished=0)

    def _abandon(self, unfinished: int | None = None) -> None:
        """Close with work in flight: free nothing that the device may use, and wake all waiters."""
        self._resources.mark_closed()
        self._resources.abandon_memory()
        self._resources.loop_states.abandon()
        self._close_driver()
        log(
            "warning", "device_closed", device=self.name, index=self.index, driver=self.driver.name,
            unfinished=unfinished,
        )  # fmt: skip

    def _close_driver(self) -> None:
        if self._owns_driver:
            self._resources.device_state.dismiss()
            self.driver.close()

    async def __aenter__(self) -> Self:
        if self._scope.closing:
            raise self._scope.closed_error()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, (TypeError, BaseExceptionGroup)):
            from .._base._explain import explain  # most programs never need it

            explain(error)
        await self._scope.exit(self, kind)
        unseen = self._resources.device_state.unseen
        if kind is None:
            unseen.raise_it()
        else:
            unseen.take()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Device {self.driver.name}:{self.index} {self.name}{state}>"
