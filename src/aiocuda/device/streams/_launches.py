"""Launches: the kernel launches of a stream. Each kernel is bound once to its grid, block and shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._base._label import labelled
from ..._base._types import Dim3
from ..._core import BoundLaunch, Estimate, NewestLaunch, Operation, Ring, StreamOperation
from ...completion._host_queue import Every
from ...errors import BusyError, ClosedError
from ...kernels import Kernel
from ...kernels._extent import check_extent
from ...kernels._kernel import check_shared_bytes, converters_of, no_kernel
from ...memory._block import Block
from ...memory._buffer import block_of
from .._resources import DeviceResources
from ._memory_access import MemoryAccess

__all__ = ["Launches"]

#: BoundLaunch launches that a stream keeps. When there are more, all are dropped; to bind one again takes 5 µs.
MOST_BOUND = 256

#: Types of an integer. `1.0` and `True` are none, although a dict finds them under the key `1`.
_INTEGERS = frozenset({int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])})


class Launches:
    """The kernel launches of a stream.

    Attributes
    ----------
    bound : dict
        Launches by kernel, grid, block and bytes of shared memory.
    newest : NewestLaunch
    """

    __slots__ = ("_access", "_queue", "_resources", "bound", "newest")

    def __init__(
        self, resources: DeviceResources, queue: Ring, access: MemoryAccess,
        bound: dict[Any, BoundLaunch] | None = None,
    ) -> None:  # fmt: skip
        self._resources = resources
        self._queue = queue
        self._access = access
        self.bound: dict[Any, BoundLaunch] = {} if bound is None else bound
        self.newest = NewestLaunch()

    def enqueue(
        self, kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int
    ) -> StreamOperation[None]:
        """Enqueue any launch. `EnqueuingStream.launch` does the same with fewer calls, where the stream has no hook."""
        newest = self.newest
        bound = newest.bound
        if (
            bound is None
            or kernel is not newest.kernel
            or grid is not newest.grid
            or block is not newest.block
            or shared_bytes is not newest.shared_bytes
        ):
            bound = self.find(kernel, grid, block, shared_bytes)
            if bound is None:
                return self.launch_new(kernel, grid, block, args, shared_bytes)
        return self.launch(bound, args)

    def find(self, kernel: Any, grid: Any, block: Any, shared_bytes: Any) -> BoundLaunch | None:
        """Return the bound launch of these arguments, and make it the newest one; None if there is none."""
        try:
            bound = self.bound.get((kernel, grid, block, shared_bytes))
        except TypeError:
            return None  # a list as grid is no key
        if bound is None or not (_is_exact(grid) and _is_exact(block) and type(shared_bytes) in _INTEGERS):
            return None
        self.newest.set(bound, kernel, grid, block, shared_bytes)
        return bound

    def launch_first(
        self, kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int, label: str | None
    ) -> Operation[None]:
        """Enqueue a launch that is not bound."""
        if label is not None:
            return labelled(label, self.launch_new, kernel, grid, block, args, shared_bytes)
        return self.launch_new(kernel, grid, block, args, shared_bytes)

    def launch(
        self, bound: BoundLaunch, args: tuple[Any, ...], values: Sequence[Any] | None = None, label: str | None = None
    ) -> StreamOperation[None]:
        """Enqueue a bound launch. ``values`` are the arguments if they have been converted already."""
        operation = bound.repeat(args, label, values)
        if operation is None:
            return self.launch_unused(bound, args, values, label)
        self.newest.launches += 1
        return operation

    def launch_unused(
        self, bound: BoundLaunch, args: tuple[Any, ...], values: Sequence[Any] | None, label: str | None
    ) -> StreamOperation[None]:
        """Enqueue a bound launch that uses memory which is new to the stream."""
        if values is None:
            values = [convert(argument) for convert, argument in zip(bound.converters, args, strict=True)]
        if label is not None:
            return labelled(label, self._launch_prepared, bound, args, values)
        return self._launch_prepared(bound, args, values)

    def _launch_prepared(
        self, bound: BoundLaunch, args: tuple[Any, ...], values: Sequence[Any]
    ) -> StreamOperation[None]:
        """Enqueue a bound launch after the waits that its memory needs."""
        queue = self._queue
        blocks = [block_of(args[index]) for index in bound.pointers]
        gate = self._access.prepare_all(blocks)
        self._access.note_launch(bound.kernel, bound.pointers, args)
        if gate is None:
            operation = queue.enqueue("launch", bound.estimate, bound.launcher, (values,), args)
        else:
            known = Estimate(bound.kernel.name)  # by name only: the time of a launch that waited predicts no other
            operation = queue.rare.enqueue_gated("launch", gate, bound.launcher, (values,), args, estimate=known)
        return self._enqueued(operation, blocks)

    def launch_new(
        self, kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int
    ) -> StreamOperation[None]:
        """Bind a launch that is new to this stream, and enqueue it; if need be, after the load of its kernel."""
        if not isinstance(kernel, Kernel):
            raise no_kernel(kernel)
        queue, resources = self._queue, self._resources
        queue.check()
        extents = check_extent(grid, block, shared_bytes, resources.properties)
        check_shared_bytes(kernel, shared_bytes)
        pointers = tuple(index for index, parameter in enumerate(kernel.signature.parameters) if parameter.is_pointer)
        estimate = queue.device_state.predictor.estimate((kernel, extents, shared_bytes), kernel.name)
        function = kernel.loaded(resources.driver, resources.index)
        if function is None:
            return self._launch_after_load(kernel, extents, pointers, args, shared_bytes)
        kernel.bind(args)  # wrong arguments are refused before the driver makes a launcher for them
        for at in pointers:
            resources.check_usable(block_of(args[at]))
        recorded = resources.driver.recorded_launch(queue.handle, function, *extents, shared_bytes)
        launcher = resources.driver.launcher(queue.handle, function, *extents, shared_bytes)
        bound = BoundLaunch(queue, recorded, launcher, estimate, pointers, converters_of(kernel), kernel)
        if len(self.bound) >= MOST_BOUND:
            self.bound.clear()
        with contextlib.suppress(TypeError):  # a list as grid is no key: each launch is bound anew
            self.bound[kernel, grid, block, shared_bytes] = bound
        return self.launch(bound, args)

    def check_empty(self, kernel: Any, block: Any, args: tuple[Any, ...], shared_bytes: Any) -> None:
        """Check a launch of no blocks as every other one."""
        if not isinstance(kernel, Kernel):
            raise no_kernel(kernel)
        check_extent(1, block, shared_bytes, self._resources.properties)
        kernel.bind(args)

    def _launch_after_load(
        self, kernel: Kernel, extents: tuple[Dim3, Dim3], pointers: tuple[int, ...], args: tuple[Any, ...],
        shared_bytes: int,
    ) -> StreamOperation[None]:  # fmt: skip
        queue, driver, device = self._queue, self._resources.driver, self._resources.index
        values = kernel.bind(args)
        blocks: list[Block] = [block_of(args[index]) for index in pointers]
        pinned = self._access.prepare_all(blocks)
        self._access.note_launch(kernel, pointers, args)

        def launch() -> None:
            function = kernel.loaded(driver, device)
            if function is None:
                raise ClosedError(f"{kernel!r} was unloaded before it could be launched")
            kernel.check_structures(args)
            driver.launcher(queue.handle, function, *extents, shared_bytes)(values)

        load = self._resources.loop_states.here().load(kernel).wanted_by(queue)
        if queue.shared:
            raise BusyError(
                f"other libraries enqueue on {queue.name} too, so its launches cannot wait on the host, and {kernel!r} "
                "is not loaded yet: `await device.load(kernel)` first"
            )
        both = load if pinned is None else Every((load, pinned))
        operation: StreamOperation[None] = queue.rare.enqueue_gated(
            "launch", both, launch, (), args, estimate=Estimate(kernel.name)
        )
        return self._enqueued(operation, blocks)

    def _enqueued(self, operation: StreamOperation[None], blocks: Sequence[Block]) -> StreamOperation[None]:
        """Note a launch, and the memory that it uses."""
        for memory in blocks:
            memory.uses[self._queue] = operation
        self.newest.launches += 1
        return operation


def _is_exact(extent: Any) -> bool:
    """True for an integer, or a tuple of integers."""
    if type(extent) is not tuple:
        return type(extent) in _INTEGERS
    for size in extent:  # `all` takes three times as long
        if type(size) not in _INTEGERS:
            return False
    return True
