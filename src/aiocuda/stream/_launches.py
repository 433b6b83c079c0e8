"""Launches: a stream's kernels, bound once and launched often."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._types import Dim3
from ..completion._failure import Failure, raisable
from ..completion._host_queue import Every
from ..completion._operation import Operation, new_operation
from ..completion._prediction import Estimate
from ..completion._stream_queue import StreamQueue
from ..driver.protocol import Launcher
from ..errors import BusyError, ClosedError, InvalidTypeError
from ..kernels import Kernel
from ..kernels._extent import check_extent
from ..memory._block import Block
from ._use import check_here, meet_all, note_launch

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["NOTHING", "Launches"]

#: Bound launches kept per stream; all are forgotten when there are more, and bound again in 5 µs each.
MOST_BOUND = 256

#: What a launch without arguments is given.
NOTHING: tuple[Any, ...] = ((),)

#: What counts as an integer. `1.0` and `True` do not, and yet a dict finds them as `1`.
_INTEGERS = frozenset({int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])})


@dataclasses.dataclass(slots=True, frozen=True)
class Bound:
    """All that does not change from launch to launch."""

    launcher: Launcher
    estimate: Estimate
    pointers: tuple[int, ...]
    takes_any: bool
    bind: Callable[[Sequence[Any]], list[Any]]
    kernel: Kernel  # this and what follows as it was given and checked
    grid: Any
    block: Any
    shared_bytes: Any


class LoadGate:
    """A kernel on its way to a device: compiled if need be, and loaded, on a worker thread."""

    def __init__(self, device: Device, kernel: Kernel) -> None:
        self._error: BaseException | None = None
        self._loaded = False
        self._waiting: dict[StreamQueue, None] = {}
        self._device = device
        self._kernel = kernel

    def start(self, queue: StreamQueue) -> LoadGate:
        driver, index, kernel = self._device.driver, self._device.index, self._kernel
        queue.reactor.jobs.start(lambda: kernel.load(driver, index), self._finished)
        return self

    def wanted_by(self, queue: StreamQueue) -> LoadGate:
        self._waiting[queue] = None
        return self

    def _finished(self, handle: int | None, error: BaseException | None) -> None:
        self._loaded = True
        self._error = error
        self._device._loading.pop((self._kernel, next(iter(self._waiting)).loop), None)
        for queue in self._waiting:
            queue.host_queue.pump()
            queue.attend()

    def ready(self, operation: Operation[Any]) -> bool:
        if self._error is not None:
            raise raisable(self._error)
        return self._loaded

    def failure(self) -> Failure | None:
        return None


class Launches:
    """The launching half of a stream."""

    __slots__ = ("_device", "_queue", "bound", "last", "launches")

    def __init__(self, device: Device, queue: StreamQueue) -> None:
        self._device = device
        self._queue = queue
        self.bound: dict[Any, Bound] = {}
        self.last: Bound | None = None  # the same objects again are found without the dict: 60 ns sooner
        self.launches = 0

    def find(self, kernel: Any, grid: Any, block: Any, shared_bytes: Any) -> Bound | None:
        """What was bound for these before."""
        try:
            bound = self.bound.get((kernel, grid, block, shared_bytes))
        except TypeError:
            return None  # a list as grid
        if bound is None or not (_is_exact(grid) and _is_exact(block) and type(shared_bytes) in _INTEGERS):
            return None
        self.last = bound
        return bound

    def launch(self, bound: Bound, args: tuple[Any, ...]) -> Operation[None]:
        """Enqueue a launch that takes memory."""
        queue, launcher, estimate = self._queue, bound.launcher, bound.estimate
        values = bound.bind(args)
        blocks: list[Block] = [args[index]._block for index in bound.pointers]
        for memory in blocks:
            used = memory.uses.get(queue)
            # One that failed or was skipped has taken the waits in front of it along.
            if used is None or (used._extra is not None and used._failure is not None) or not memory.ready:
                gate = meet_all(queue, blocks, self._device)
                note_launch(queue, bound.kernel, bound.pointers, args)
                break
        else:
            gate = None
        if gate is None:
            operation: Operation[None] = new_operation(queue, "launch", estimate, args)
            queue.submit(operation, launcher, (values,))
        else:
            known = Estimate(bound.kernel.name)  # by its name; what waited says little of those that do not
            operation = queue.enqueue_behind("launch", gate, launcher, (values,), args, estimate=known)
        for memory in blocks:
            memory.uses[queue] = operation
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
        queue, device = self._queue, self._device
        queue.check()
        extents = check_extent(grid, block, shared_bytes, device.properties)
        pointers = tuple(index for index, parameter in enumerate(kernel.signature.parameters) if parameter.is_pointer)
        estimate = queue.device_state.predictor.estimate((kernel, extents, shared_bytes), kernel.name)
        function = kernel.loaded(device.driver, device.index)
        if function is None:
            return self._behind_load(kernel, extents, pointers, args, shared_bytes)
        kernel.bind(args)  # what cannot be is refused before the driver makes a launcher for it
        for at in pointers:
            check_here(args[at]._block, device)
        launcher = device.driver.launcher(queue.handle, function, *extents, shared_bytes)
        takes_any = bool(kernel.signature.parameters)
        bound = Bound(launcher, estimate, pointers, takes_any, kernel.bind, kernel, grid, block, shared_bytes)
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
    ) -> Operation[None]:
        queue, device = self._queue, self._device
        values = kernel.bind(args)
        blocks: list[Block] = [args[index]._block for index in pointers]
        pinned = meet_all(queue, blocks, device)
        note_launch(queue, kernel, pointers, args)

        def late() -> None:
            function = kernel.loaded(device.driver, device.index)
            if function is None:
                raise ClosedError(f"{kernel!r} was unloaded before it could be launched")
            device.driver.launcher(queue.handle, function, *extents, shared_bytes)(values)

        key = (kernel, queue.loop)
        gate = device._loading.get(key)
        if gate is None:
            gate = device._loading[key] = LoadGate(device, kernel).start(queue)
        load = gate.wanted_by(queue)
        if queue.shared:
            raise BusyError(
                f"others enqueue on {queue.name} too, so nothing of ours may wait in front of it, and {kernel!r} is not"
                " loaded yet: `await device.load(kernel)` first"
            )
        both = load if pinned is None else Every((load, pinned))
        operation = queue.enqueue_behind("launch", both, late, (), args, estimate=Estimate(kernel.name))
        for memory in blocks:
            memory.uses[queue] = operation
        self.launches += 1
        return operation


def _is_exact(extent: Any) -> bool:
    """An integer, or a tuple of integers."""
    if type(extent) is not tuple:
        return type(extent) in _INTEGERS
    for size in extent:  # `all` takes three times as long
        if type(size) not in _INTEGERS:
            return False
    return True
