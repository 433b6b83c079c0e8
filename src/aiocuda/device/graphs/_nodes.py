"""Nodes: what one method of a stream records, with the checks of that method. Nothing is given to a driver."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..._base._arrays import address_of, check_alike
from ..._base._types import SourceLine
from ...completion._methods import METHODS
from ...completion._progress import check_awaited
from ...driver.protocol import CopyNode, EmptyNode, FillNode, KernelNode, Node
from ...errors import InvalidTypeError, UnsupportedError
from ...kernels import Kernel
from ...kernels._extent import check_extent
from ...kernels._kernel import check_shared_bytes, no_kernel
from ...memory._block import Block
from ...memory._buffer import DeviceBuffer, block_of
from ...memory._pinned import PinnedBuffer, pinned_block_of
from ...memory.interchange._host_arrays import as_source, as_target
from .._resources import DeviceResources
from ..streams._checker import Touch, touches_of
from ..streams._transfers import check_overlap, pattern_of, refuse_host_copy

__all__ = ["NODES", "GraphNode", "arguments_of", "copy_node", "launch_node"]


@dataclasses.dataclass(frozen=True, slots=True)
class GraphNode:
    """One recorded operation."""

    kind: str  #: as of the operation that the method would enqueue
    driver_node: Node  #: the driver's form of it; the function of a launch is 0 until the kernel is loaded
    blocks: tuple[Block, ...] = ()  #: the memory that it uses
    keep: tuple[Any, ...] = ()  #: the buffers and arrays of the method's arguments, held as long as the node
    kernel: Kernel | None = None
    writes: tuple[int, int] | None = None  #: address and bytes of the host memory that it writes
    stream: str = ""  #: the name of the captured stream
    line: SourceLine | None = None  #: of the program, if the device has a checker

    def placed(self, after: tuple[int, ...], stream: str, line: SourceLine | None) -> GraphNode:
        """Return the same node, dependent on these nodes of the graph, of this stream and this line of the program."""
        node = dataclasses.replace(self.driver_node, after=after)
        return dataclasses.replace(self, driver_node=node, stream=stream, line=line)

    def touches(self) -> list[Touch]:
        """Return its accesses to device memory, for the checker."""
        # An upload into an existing buffer is the method `copy`.
        accesses = METHODS["copy" if self.kind == "upload" else self.kind].accesses
        arguments = self.keep if self.kernel is None else (self.kernel, None, None, self.keep)
        return touches_of(accesses, arguments) if self.keep else []

    def for_driver(self, resources: DeviceResources) -> Node:
        """Return the driver's node with its kernel loaded. **May block**, to compile and load it."""
        node, kernel = self.driver_node, self.kernel
        if kernel is None or not isinstance(node, KernelNode):
            return node
        function = kernel.loaded(resources.driver, resources.index)
        if function is None:
            function = kernel.load(resources.driver, resources.index)
        kernel.check_structures(self.keep)
        return dataclasses.replace(node, function=function)


def launch_node(
    resources: DeviceResources, kernel: Any, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: Any
) -> GraphNode:
    if not isinstance(kernel, Kernel):
        raise no_kernel(kernel)
    extents = check_extent(grid, block, shared_bytes, resources.properties)
    check_shared_bytes(kernel, shared_bytes)
    values = tuple(kernel.bind(args))
    blocks = [
        block_of(args[index]) for index, parameter in enumerate(kernel.signature.parameters) if parameter.is_pointer
    ]
    for memory in blocks:
        resources.check_usable(memory)
    return GraphNode("launch", KernelNode(0, *extents, shared_bytes, values), tuple(blocks), args, kernel)


def copy_node(resources: DeviceResources, target: Any, source: Any) -> GraphNode:
    """Return the node of a copy between the device and pinned memory, or within the device."""
    if isinstance(target, DeviceBuffer):
        if isinstance(source, DeviceBuffer):
            return _between(resources, target, source)
        return _transfer(resources, "upload", target, as_source(source))
    if isinstance(source, DeviceBuffer):
        return _transfer(resources, "download", source, as_target(target))
    refuse_host_copy(target, source)


def _transfer(resources: DeviceResources, kind: Any, buffer: DeviceBuffer, array: Any) -> GraphNode:
    check_alike(buffer, array)
    resources.check_usable(block_of(buffer))
    up = kind == "upload"
    if not buffer.nbytes:
        return GraphNode(kind, EmptyNode())
    pinned = pinned_block_of(array) if isinstance(array, PinnedBuffer) else None
    if pinned is None:
        raise UnsupportedError(
            f"this {array.shape} array is not pinned, and a graph copies without the host, which would stage it: make "
            f"it by device.pinned({array.shape}, {str(array.dtype)!r}), or lock it by `async with device.pin(array)`"
        )
    resources.check_usable(pinned)
    host = address_of(array)
    to, origin = (buffer.address, host) if up else (host, buffer.address)
    writes = None if up else (host, buffer.nbytes)
    node = CopyNode(kind, to, origin, buffer.nbytes)
    return GraphNode(kind, node, (block_of(buffer), pinned), (buffer, array), writes=writes)


def _between(resources: DeviceResources, target: DeviceBuffer, source: DeviceBuffer) -> GraphNode:
    check_alike(target, source)
    to, origin = block_of(target), block_of(source)
    if to.device != origin.device:
        raise UnsupportedError(
            f"a graph is of one device, and this copies from device {origin.device} to device {to.device}: copy before "
            "or after its launch"
        )
    for block in (to, origin):
        resources.check_usable(block)
    if not target.nbytes:
        return GraphNode("copy", EmptyNode())
    check_overlap(target, source)
    node = CopyNode("copy", target.address, source.address, target.nbytes)
    return GraphNode("copy", node, (to, origin), (target, source))


def fill_node(resources: DeviceResources, buffer: Any, value: object) -> GraphNode:
    if not isinstance(buffer, DeviceBuffer):
        check_awaited(buffer, "the buffer to fill")
        raise InvalidTypeError(f"fill takes a device buffer, not {type(buffer).__name__}: NumPy has a.fill(value)")
    pattern = pattern_of(buffer.dtype, value)
    resources.check_usable(block_of(buffer))
    if not buffer.nbytes:
        return GraphNode("fill", EmptyNode())
    node = FillNode(buffer.address, pattern, buffer.nbytes // len(pattern))
    return GraphNode("fill", node, (block_of(buffer),), (buffer,))


#: The functions that make the node of a method, by its name. They take the method's arguments.
NODES: dict[str, Callable[..., GraphNode]] = {
    "launch": launch_node,
    "copy": copy_node,
    "fill": fill_node,
}


@functools.cache
def arguments_of(make: Callable[..., GraphNode]) -> tuple[str, ...]:
    """Return the names of the method's arguments that a function of `NODES` takes."""
    return tuple(inspect.signature(make).parameters)[1:]
