"""Steps: what one verb records. It is checked now, as the verb would check it; nothing reaches a driver."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..driver.protocol import CopyNode, EmptyNode, FillNode, KernelNode, Node
from ..errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from ..kernels import Kernel
from ..kernels._extent import check_extent
from ..memory._arrays import address_of, as_source, as_target, check_awaited
from ..memory._block import Block
from ..memory._buffer import DeviceBuffer
from ..memory._pinned import PinnedBuffer
from ..stream._transfers import check_alike, pattern_of
from ..stream._use import check_here

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["Step", "copy_step", "fill_step", "launch_step"]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One recorded operation."""

    kind: str
    node: Node  #: a launch's function is 0 until the kernel is on the device
    blocks: tuple[Block, ...] = ()  #: whose memory it works on
    keep: object = None
    kernel: Kernel | None = None
    writes: tuple[int, int] | None = None  #: (address, bytes) of the host's memory

    def behind(self, after: tuple[int, ...]) -> Step:
        """The same behind other steps."""
        return dataclasses.replace(self, node=dataclasses.replace(self.node, after=after))

    def for_driver(self, device: Device) -> Node:
        """The node as the driver takes it. **May block**, to compile and load a kernel that is not there yet."""
        node, kernel = self.node, self.kernel
        if kernel is None or not isinstance(node, KernelNode):
            return node
        function = kernel.loaded(device.driver, device.index)
        if function is None:
            function = kernel.load(device.driver, device.index)
        return dataclasses.replace(node, function=function)


def launch_step(device: Device, kernel: Any, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: Any) -> Step:
    """A launch."""
    if not isinstance(kernel, Kernel):
        raise InvalidTypeError(f"launch takes an aiocuda.Kernel, not {type(kernel).__name__}")
    extents = check_extent(grid, block, shared_bytes, device.properties)
    values = tuple(kernel.bind(args))
    blocks = [args[index]._block for index, parameter in enumerate(kernel.signature.parameters) if parameter.is_pointer]
    for memory in blocks:
        check_here(memory, device)
    return Step("launch", KernelNode(0, *extents, shared_bytes, values), tuple(blocks), args, kernel)


def copy_step(device: Device, target: Any, source: Any) -> Step:
    """A copy between the device and pinned memory, or within the device."""
    if isinstance(target, DeviceBuffer) and isinstance(source, DeviceBuffer):
        return _between(device, target, source)
    if isinstance(target, DeviceBuffer):
        return _transfer(device, "upload", target, as_source(source))
    if isinstance(source, DeviceBuffer):
        return _transfer(device, "download", source, as_target(target))
    for side, thing in (("target", target), ("source", source)):
        (as_target if side == "target" else as_source)(thing)
    raise InvalidArgumentError("neither side of the copy is device memory: use NumPy between host arrays")


def _transfer(device: Device, kind: Any, buffer: DeviceBuffer, array: Any) -> Step:
    check_alike(buffer, array)
    check_here(buffer._block, device)
    up = kind == "upload"
    if not buffer.nbytes:
        return Step(kind, EmptyNode())
    pinned = array._pinned_block() if isinstance(array, PinnedBuffer) else None
    if pinned is None:
        raise UnsupportedError(
            f"this {array.shape} array is not pinned, and a graph copies without the host, which would stage it: make "
            f"it by device.pinned({array.shape}, {str(array.dtype)!r}), or lock it by `async with device.pin(array)`"
        )
    check_here(pinned, device)
    host = address_of(array)
    there, here = (buffer.address, host) if up else (host, buffer.address)
    writes = None if up else (host, buffer.nbytes)
    node = CopyNode(kind, there, here, buffer.nbytes)
    return Step(kind, node, (buffer._block, pinned), (buffer, array), writes=writes)


def _between(device: Device, target: DeviceBuffer, source: DeviceBuffer) -> Step:
    check_alike(target, source)
    to, origin = target._block, source._block
    if to.device != origin.device:
        raise UnsupportedError(
            f"a graph is of one device, and this copies from device {origin.device} to device {to.device}: copy before "
            "or behind its launch"
        )
    for block in (to, origin):
        check_here(block, device)
    if not target.nbytes:
        return Step("copy", EmptyNode())
    if to is origin and abs(target.address - source.address) < target.nbytes:
        raise InvalidArgumentError(f"source and target overlap in one buffer: {source!r} and {target!r}")
    node = CopyNode("copy", target.address, source.address, target.nbytes)
    return Step("copy", node, (to, origin), (target, source))


def fill_step(device: Device, buffer: Any, value: object) -> Step:
    """Every item the same."""
    if not isinstance(buffer, DeviceBuffer):
        check_awaited(buffer, "the buffer to fill")
        raise InvalidTypeError(f"fill takes a device buffer, not {type(buffer).__name__}: NumPy has a.fill(value)")
    pattern = pattern_of(buffer.dtype, value)
    check_here(buffer._block, device)
    if not buffer.nbytes:
        return Step("fill", EmptyNode())
    node = FillNode(buffer.address, pattern, buffer.nbytes // len(pattern))
    return Step("fill", node, (buffer._block,), buffer)
