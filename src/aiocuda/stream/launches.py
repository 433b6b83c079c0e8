"""Launches: a stream's kernels, bound once and launched often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..completion.failure import Failure
from ..completion.lane import Lane
from ..completion.operation import Operation
from ..completion.predict import Estimate
from ..driver.protocol.code import Launcher
from ..errors import ClosedError, InvalidTypeError
from ..kernel import Kernel
from ..memory.block import Block
from ..types import Dim3
from .use import meet

if TYPE_CHECKING:
    from ..device import Device

__all__ = ["NOTHING", "Launches"]

#: Bound launches kept per stream; all are forgotten when there are more, and bound again in 5 µs each.
MOST_BOUND = 256


#: What a launch without arguments is given.
NOTHING: tuple[Any, ...] = ((),)


class Bound(NamedTuple):
    """All that does not change from launch to launch."""

    launcher: Launcher
    estimate: Estimate
    pointers: tuple[int, ...]
    takes_any: bool
    bind: Callable[[Sequence[Any]], list[Any]]


class LoadGate:
    """A kernel on its way to a device: compiled if need be, and loaded, on a worker thread."""

    def __init__(self, device: Device, kernel: Kernel) -> None:
        self._error: BaseException | None = None
        self._loaded = False
        self._waiting: set[Lane] = set()
        self._device = device
        self._kernel = kernel

    def start(self, lane: Lane) -> LoadGate:
        driver, index, kernel = self._device.driver, self._device.index, self._kernel
        lane.reactor.jobs.start(lambda: kernel.load(driver, index), self._finished)
        return self

    def wanted_by(self, lane: Lane) -> LoadGate:
        self._waiting.add(lane)
        return self

    def _finished(self, handle: int | None, error: BaseException | None) -> None:
        self._loaded = True
        self._error = error
        self._device._loading.pop((self._kernel, next(iter(self._waiting)).loop), None)
        for lane in self._waiting:
            lane.queue.pump()
            lane.attend()

    def ready(self, operation: Operation[Any]) -> bool:
        if self._error is not None:
            raise self._error
        return self._loaded

    def failure(self) -> Failure | None:
        return None


class Launches:
    """The launching half of a stream."""

    __slots__ = ("_device", "_lane", "bound", "launches")

    def __init__(self, device: Device, lane: Lane) -> None:
        self._device = device
        self._lane = lane
        self.bound: dict[Any, Bound] = {}
        self.launches = 0

    def launch(self, bound: Bound, args: tuple[Any, ...]) -> Operation[None]:
        """Enqueue a launch that takes memory."""
        launcher, estimate, pointers, _, bind = bound
        lane = self._lane
        values = bind(args)
        blocks: list[Block] = [args[index]._block for index in pointers]
        for memory in blocks:
            if memory.freed or lane not in memory.uses:
                meet(lane, memory, self._device)
        operation = lane.enqueue("launch", estimate, launcher, (values,), args)
        for memory in blocks:
            memory.uses[lane] = operation
        self.launches += 1
        return operation

    def launch_new(
        self, kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int
    ) -> Operation[None]:
        """Enqueue a launch that is new to this stream."""
        bound = self._bind(kernel, grid, block, args, shared_bytes)
        return bound if isinstance(bound, Operation) else self.launch(bound, args)

    def _bind(
        self, kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int
    ) -> Bound | Operation[None]:
        """Bind a launch that is new to this stream; if the kernel is new to the device, enqueue behind its load."""
        if not isinstance(kernel, Kernel):
            raise InvalidTypeError(f"launch takes an aiocuda.Kernel, not {type(kernel).__name__}")
        lane, device = self._lane, self._device
        lane.check()
        extents = kernel.check_launch(grid, block, shared_bytes, device.properties)
        pointers = tuple(index for index, parameter in enumerate(kernel.signature.parameters) if parameter.is_pointer)
        estimate = lane.hub.predictor.estimate((kernel, extents, shared_bytes))
        function = kernel.loaded(device.driver, device.index)
        if function is None:
            return self._behind_load(kernel, extents, pointers, args, shared_bytes, estimate)
        launcher = device.driver.launcher(lane.handle, function, *extents, shared_bytes)
        bound = Bound(launcher, estimate, pointers, bool(kernel.signature.parameters), kernel.bind)
        if len(self.bound) >= MOST_BOUND:
            self.bound.clear()
        try:
            self.bound[kernel, grid, block, shared_bytes] = bound
        except TypeError:
            return bound  # a list as grid cannot be a key: it is bound anew each time
        return bound

    def _behind_load(
        self,
        kernel: Kernel,
        extents: tuple[Dim3, Dim3],
        pointers: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int,
        estimate: Estimate,
    ) -> Operation[None]:
        lane, device = self._lane, self._device
        values = kernel.bind(args)
        blocks: list[Block] = [args[index]._block for index in pointers]
        for memory in blocks:
            meet(lane, memory, device)

        def late() -> None:
            function = kernel.loaded(device.driver, device.index)
            if function is None:
                raise ClosedError(f"{kernel!r} was unloaded before it could be launched")
            device.driver.launcher(lane.handle, function, *extents, shared_bytes)(values)

        key = (kernel, lane.loop)
        gate = device._loading.get(key)
        if gate is None:
            gate = device._loading[key] = LoadGate(device, kernel).start(lane)
        operation = lane.enqueue_behind("launch", gate.wanted_by(lane), late, (), args)
        for memory in blocks:
            memory.uses[lane] = operation
        self.launches += 1
        return operation
