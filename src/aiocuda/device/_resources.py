"""DeviceResources: everything that the streams, graphs, pools and coordinators of one opened device share.

Streams and graphs receive it as an argument, so they do not import `aiocuda.Device`. Packages above the device call
`resources_of(device)`.
"""

from __future__ import annotations

import functools
from asyncio import AbstractEventLoop, Task
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from .._base._collections import COLLECTIONS
from .._base._shutdown import DrainDeadline
from .._base._types import DeviceProperties
from .._core import Ring, StreamOperation
from ..completion._device_state import DeviceState
from ..completion._reactor import Reactor
from ..completion._waiting_calls import WaitingCalls
from ..driver.protocol import Driver
from ..errors import AiocudaError, BusyError, ClosedError, InvalidTypeError, WrongDeviceError
from ..kernels import Kernel
from ..kernels._extent import check_extent
from ..kernels._kernel import kernel_of_ptx
from ..memory._allocator import DeviceMemory
from ..memory._block import Block
from ..memory._buffer import DeviceBuffer
from ..memory._host_writes import HOST_WRITES
from ..memory._managed import ManagedBlock
from ..memory._pinned import PinnedPool
from ..memory.interchange._exports import Exports
from ..memory.interchange._foreign import ForeignMemory
from ._device_streams import DeviceStreams
from ._loop_state import LoopState, LoopStates
from ._open_devices import OPEN_DEVICES
from ._stream_imports import StreamImports

if TYPE_CHECKING:
    from .streams._checker import Checker
    from .streams._hook import StreamHook
    from .streams._stream import Stream

__all__ = ["DeviceResources", "DriverGraphs", "resources_of"]


class DriverGraphs:
    """The driver's executable graphs of one device, by handle.

    ``made`` has all graphs that are not destroyed; ``dropped`` has those that the program does not hold any more. A
    finaliser adds to it, and does nothing else: it may run on any thread, in the middle of other code.
    """

    __slots__ = ("_driver", "dropped", "made")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.made: set[int] = set()
        self.dropped: list[int] = []

    def watch(self, reactor: Reactor) -> None:
        """Destroy dropped graphs from this loop, too, from now on."""
        if not any(getattr(sweep, "func", None) == self.sweep for sweep in reactor.sweeps):
            reactor.sweeps = (*reactor.sweeps, functools.partial(self.sweep, reactor))
        self.sweep(reactor)

    def sweep(self, reactor: Reactor) -> None:
        """Destroy the dropped graphs, on a worker thread. After a fault the driver is not called."""
        graphs: list[int] = []
        while self.dropped:
            try:
                graphs.append(self.dropped.pop())
            except IndexError:
                break  # another loop has taken it
        if graphs and self._driver.fault is None:
            reactor.jobs.start(functools.partial(self._destroy, graphs), reactor.jobs.report_unawaited)

    def _destroy(self, graphs: list[int]) -> None:
        """Destroy graphs. Blocks: only on a worker thread."""
        for graph in graphs:
            self.made.discard(graph)
            self._driver.graph_destroy(graph)

    def abandon(self) -> None:
        """Destroy none of them: the device may still run them, and nothing watches it any more."""
        self.made.clear()
        self.dropped.clear()

    def close(self) -> Callable[[], None]:
        """Return a function that destroys all of them, for a worker thread. The device is closed and drained."""
        made = sorted(self.made)
        self.abandon()
        return functools.partial(self._destroy, made)


class DeviceResources:
    """Everything that the streams, graphs, pools and coordinators of one opened device share.

    Parameters
    ----------
    capture
        Makes the `aiocuda.graph.Capture` that `Stream.capture` returns: graphs are a layer above streams.

    """

    __slots__ = ("__weakref__", "capture", "checker", "closed", "closing", "deadline", "device",
                 "device_state", "driver", "follow", "functions", "graphs", "host_writes", "imports", "index",
                 "loop_states", "memory", "pinned_pool", "properties", "streams", "waiting_calls")  # fmt: skip

    def __init__(
        self, device: Any, device_state: DeviceState, drain_timeout: float,
        capture: Callable[[DeviceResources, Any], Any],
    ) -> None:  # fmt: skip
        self.device = device  #: the public object, for ``stream.device``, ``graph.device`` and ``buffer.device``
        self.device_state = device_state  #: events, predictions and limits that the device's loops share
        self.driver = device_state.driver
        self.index = device_state.device
        self.properties: DeviceProperties = device_state.properties
        self.waiting_calls = WaitingCalls.of(self.driver)  #: its calls that may wait for running kernels
        exports = Exports(device_state, lambda handle: self.imports.queue_of(handle))
        self.pinned_pool = PinnedPool(device_state, exports)
        self.memory = DeviceMemory(
            device_state,
            device,
            exports,
            ForeignMemory(device_state, device, exports, self.pinned_pool),
            reactor=self.open_reactor,
            known_reactor=self.known_reactor,
            newest_unfinished=self.unfinished_operation,
        )
        self.host_writes = HOST_WRITES  #: bytes of host memory that operations of this process are writing
        self.graphs = DriverGraphs(self.driver)
        self.loop_states = LoopStates(device_state, self.memory, self.pinned_pool)
        self.streams = DeviceStreams(device_state, self.memory, self.loop_states)
        #: Finds and imports streams of other libraries.
        self.imports = StreamImports(device_state, self.loop_states, self.streams)
        self.checker: Checker | None = None  #: finds unordered accesses, if the device was opened with ``check=True``
        #: Makes later work of a queue wait, on the device, for an unfinished operation of another stream.
        self.follow: Callable[[Any, StreamOperation[Any]], None] = Ring.follow
        self.deadline = DrainDeadline(drain_timeout)  #: the time that is left to a shutdown after an exception
        #: The tasks of all loops that run functions which the end of the device waits for.
        self.functions: set[Task[Any]] = set()
        self.closing = False  #: True if all its objects refuse new work
        self.closed = False
        self.capture = capture
        OPEN_DEVICES.add(self)
        COLLECTIONS.add_device(self)

    def loop_state(self, *, while_closing: bool = False) -> LoopState:
        """Return the running loop's state; with ``while_closing`` also for work that a closing device has accepted.

        Raises
        ------
        ClosedError, DeviceFault
            The device has been closed, or is being closed; it has failed.
        """
        if while_closing and self.closing and not self.closed:
            return self.loop_states.here()
        if self.closed or self.closing:
            raise ClosedError(f"{self.properties.name} has been closed: open it again with aiocuda.open_device()")
        fault = self.driver.fault
        if fault is not None:
            raise fault.again()
        return self.loop_states.here()

    def open_reactor(self) -> Reactor:
        """Return the running loop's reactor. Raises what `loop_state` raises."""
        return self.loop_state().reactor

    def known_reactor(self, loop: AbstractEventLoop) -> Reactor | None:
        """Return a loop's reactor, or None if the loop has not used the device."""
        loop_state = self.loop_states.get(loop)
        return None if loop_state is None else loop_state.reactor

    def unfinished_operation(self) -> StreamOperation[Any] | None:
        """Return an operation of any stream that is not known to have finished, or None."""
        return self.loop_states.unfinished_operation()

    def check_usable(self, memory: Block) -> None:
        """Raise unless a stream of this device may use the memory.

        Every device of the driver that has concurrent managed access may use managed memory. `StaleHandleError` if it
        has been freed, `WrongDeviceError` if it belongs to another device or driver.
        """
        memory.check()
        if memory.driver is not self.driver:
            raise WrongDeviceError(
                f"{memory} belongs to another driver ({memory.driver.name!r}, opened apart from this one): download it "
                "on a stream of its own and upload it here, or open both devices on one driver"
            )
        if memory.device not in (self.index, -1):
            if isinstance(memory, ManagedBlock):
                memory.check_shared(self.properties)
                return
            raise WrongDeviceError(
                f"this buffer lives on device {memory.device}, the stream is on device {self.index}: "
                "bring it over by stream.copy(target, source)"
            )

    def check_with(self, checker: Checker) -> None:
        """Find unordered accesses from now on, by the checker of another open device of the driver, or else by this."""
        self.checker = checker = OPEN_DEVICES.checker_of(self.driver) or checker
        self.follow = checker.follow

    def allocate(self, queue: Ring, shape: int | Sequence[int], dtype: npt.DTypeLike) -> DeviceBuffer:
        """Return new memory in the order of a stream, without its hook: also while it records into a graph."""
        queue.check()
        return self.memory.empty(queue, shape, dtype)

    @staticmethod
    def add_hook(stream: Stream, hook: StreamHook) -> StreamHook | None:
        """Run a hook in place of a stream's methods from now on. Return the former one, which the hook calls.

        Raises
        ------
        BusyError
            The stream is being captured: the end of the capture puts the former hook back.
        """
        if stream._queue.recorded:
            raise BusyError(f"{stream.name} is being captured: leave the `async with stream.capture()` block first")
        return stream._put_hook(hook)

    @staticmethod
    def remove_hook(stream: Stream, hook: StreamHook, former: StreamHook | None) -> None:
        """Run the former hook of a stream again, unless another one has taken the place of this one."""
        if stream._hook is hook:
            stream._put_hook(former)

    def check_extent(self, grid: object, block: object, shared_bytes: object) -> None:
        """Raise `InvalidArgumentError` unless the device can launch a kernel with this extent."""
        check_extent(grid, block, shared_bytes, self.properties)

    @staticmethod
    def kernel_of_ptx(
        read: Callable[[str], str], name: str, parameters: str, host: Callable[..., object]
    ) -> Kernel:  # fmt: skip
        """Return a kernel that is shipped as PTX. ``read(name)`` returns that, on a worker thread."""
        return kernel_of_ptx(read, name, parameters, host)

    def refuse(self) -> None:
        """Refuse new work, in all loops. The order matters: when one object refuses, no other may accept any more."""
        self.closing = True
        self.streams.begin_close()
        self.device_state.end_cross_device_uses()
        for loop_state in self.loop_states:
            loop_state.refuse()

    def is_closed(self) -> bool:
        """Return whether the device is closed: then nothing of it needs an end."""
        return self.closed

    def mark_closed(self) -> None:
        """Note that the device is closed: it destroys the streams that are open, or leaves them."""
        if not self.closed:
            for observer in OPEN_DEVICES.observers:
                observer.closing(self.device)
        self.closed = True
        self.streams.mark_closed()
        COLLECTIONS.remove_device(self)

    def busy_elsewhere(self) -> bool:
        """True if other loops, worker threads, coordinators or streams of other devices still use this one."""
        loop_states = self.loop_states
        return (
            loop_states.busy_elsewhere()
            or loop_states.blocking()
            or loop_states.expect_work()
            or self.device_state.is_used_by_others()
        )

    def abandon_memory(self) -> None:
        """Free nothing: the device may still use its memory and its graphs, and nothing watches it any more."""
        self.graphs.abandon()
        self.memory.abandon()
        self.pinned_pool.abandon()

    def unfinished(self) -> bool:
        """True if the device has unfinished work. For the interpreter's exit."""
        try:
            return self.driver.fault is None and self.loop_states.unfinished()
        except AiocudaError:
            return False  # its driver has been closed, or has failed just now: there is nothing to wait for


def resources_of(device: Any) -> DeviceResources:
    """Return the resources of an `aiocuda.Device`, for packages above it. `InvalidTypeError` for anything else."""
    try:
        resources = device._resources  # the one place that reads it
    except AttributeError:
        resources = None
    if not isinstance(resources, DeviceResources):
        raise InvalidTypeError(f"this takes an aiocuda.Device, not {type(device).__name__}")
    return resources
