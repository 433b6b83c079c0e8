"""Launch: a kernel with its launch configuration and the slot's buffers, as the function of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..completion._operation import Operation
from ..errors import InvalidTypeError
from ..kernels import Kernel
from ..kernels._binding import argument_count_error
from ..memory._arrays import as_dtype, as_shape
from ..memory._buffer import DeviceBuffer
from ._slot import Slot

__all__ = ["Launch", "SlotBuffer"]


class SlotBuffer:
    """A buffer of whichever slot has the item, by its name: what `Slot.buffer` returns there.

    Parameters
    ----------
    name, shape, dtype
        As in `Slot.buffer`.

    Examples
    --------
    >>> SlotBuffer("x", 1024)
    <SlotBuffer x (1024,) float32>
    """

    __slots__ = ("dtype", "name", "shape")

    def __init__(self, name: str, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> None:
        if not isinstance(name, str):
            raise InvalidTypeError(f"a slot's buffer has a string as its name, not {name!r}")
        self.name = name
        self.dtype = as_dtype(dtype)
        self.shape = as_shape(shape, self.dtype.itemsize)

    def of(self, slot: Slot) -> DeviceBuffer:
        """The slot's own."""
        return slot.buffer(self.name, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"<SlotBuffer {self.name} {self.shape} {self.dtype}>"


class Launch:
    """What a stage does that launches one kernel: ``Stage("square", Launch(square, blocks, 256, x, y, n))``.

    ``cuLaunchKernelEx``.

    Parameters
    ----------
    kernel, grid, block, shared_bytes
        As in `aiocuda.Stream.launch`.
    *args
        The kernel's arguments. A `SlotBuffer` stands for the slot's own; a function is called with the slot, and what
        it returns is the argument: ``lambda slot: len(slot.item)``.

    Attributes
    ----------
    kernel : Kernel
    grid, block : int or tuple of int
    shared_bytes : int
    args : tuple
    inputs, outputs : tuple of str
        Names of the slot's buffers that the kernel only reads, by its ``const`` parameters, and of the others.

    Raises
    ------
    InvalidTypeError
        No kernel; more or fewer arguments than it has parameters.
    """

    __slots__ = ("args", "block", "grid", "inputs", "kernel", "outputs", "shared_bytes")

    def __init__(
        self, kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], *args: Any, shared_bytes: int = 0
    ) -> None:
        if not isinstance(kernel, Kernel):
            raise InvalidTypeError(f"a stage launches an aiocuda.Kernel, not {type(kernel).__name__}")
        parameters = kernel.signature.parameters
        if len(args) != len(parameters):
            raise argument_count_error(kernel.signature, args)
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes
        self.args = args
        buffers = [
            (one.name, parameter.is_const)
            for one, parameter in zip(args, parameters, strict=True)
            if isinstance(one, SlotBuffer)
        ]
        self.outputs = tuple(dict.fromkeys(name for name, is_const in buffers if not is_const))
        self.inputs = tuple(dict.fromkeys(name for name, is_const in buffers if is_const))

    @property
    def varies(self) -> bool:
        """Is any argument a function of the slot?"""
        return any(callable(one) for one in self.args)

    def arguments(self, slot: Slot) -> list[Any]:
        """The kernel's arguments, for the item that the slot has."""
        return [_argument(one, slot) for one in self.args]

    def __call__(self, slot: Slot) -> Operation[None]:
        """Enqueue it on the slot's stream."""
        arguments = self.arguments(slot)
        return slot.stream.launch(self.kernel, self.grid, self.block, *arguments, shared_bytes=self.shared_bytes)

    def __repr__(self) -> str:
        return f"<Launch {self.kernel.name} grid={self.grid} block={self.block}>"


def _argument(given: Any, slot: Slot) -> Any:
    if isinstance(given, SlotBuffer):
        return given.of(slot)
    return given(slot) if callable(given) else given
