"""Launch: a kernel with its launch configuration and the slot's buffers, as the function of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._base._arrays import as_dtype, as_shape
from .._base._launch import read_launch
from ..completion import Operation
from ..errors import InvalidTypeError
from ..kernels import Kernel
from ..memory import DeviceBuffer
from ._slot import Slot

__all__ = ["Launch", "SlotBuffer"]


_LAUNCH = "it takes grid=, block=, n= and shared_bytes=; the kernel's own arguments have no keywords"


class SlotBuffer:
    """The name, shape and dtype of a slot's buffer: an argument that means the buffer of the item's slot.

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
        """Return this slot's buffer."""
        return slot.buffer(self.name, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"<SlotBuffer {self.name} {self.shape} {self.dtype}>"


class Launch:
    """A stage function that launches one kernel: ``Stage("square", Launch(square, x, y, n, n=n))``.

    It calls ``cuLaunchKernelEx``.

    Parameters
    ----------
    kernel, grid, block, n, shared_bytes
        As in `aiocuda.Stream.launch`: grid and block, or ``n=`` and ``block=``.
    *args
        The kernel's arguments. A `SlotBuffer` is replaced by the slot's buffer. A function is called with the slot and
        returns the argument: ``lambda slot: len(slot.item)``.

    Attributes
    ----------
    kernel : Kernel
    grid, block : int or tuple of int
    shared_bytes : int
    args : tuple
    inputs, outputs : tuple of str
        Names of the slot's buffers that the kernel only reads (its ``const`` parameters), and of the other ones.

    Raises
    ------
    InvalidTypeError
        Not a kernel; not as many arguments as the kernel has parameters.
    """

    __slots__ = ("_is_empty", "args", "block", "grid", "inputs", "kernel", "outputs", "shared_bytes")

    def __init__(
        self, kernel: Kernel = None, grid: Any = None, block: Any = None, /, *args: Any, shared_bytes: int = 0,  # type: ignore[assignment]
        **launch: Any,
    ) -> None:  # fmt: skip
        if launch:
            kernel, grid, block, args = read_launch("Launch", (kernel, grid, block, *args), launch, _LAUNCH, {})
        self._is_empty = "n" in launch and not grid
        if not isinstance(kernel, Kernel):
            raise InvalidTypeError(f"a stage launches an aiocuda.Kernel, not {type(kernel).__name__}")
        parameters = kernel.signature.parameters
        if len(args) != len(parameters):
            raise kernel.signature.count_error(args)
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes
        self.args = args
        buffers = [
            (arg.name, parameter.is_const)
            for arg, parameter in zip(args, parameters, strict=True)
            if isinstance(arg, SlotBuffer)
        ]
        self.outputs = tuple(dict.fromkeys(name for name, is_const in buffers if not is_const))
        self.inputs = tuple(dict.fromkeys(name for name, is_const in buffers if is_const))

    @property
    def varies(self) -> bool:
        """True if an argument is a function of the slot."""
        return any(callable(arg) for arg in self.args)

    def arguments(self, slot: Slot) -> list[Any]:
        """Return the kernel's arguments for the slot's item."""
        return [_argument(arg, slot) for arg in self.args]

    def __call__(self, slot: Slot) -> Operation[None]:
        """Enqueue the launch on the slot's stream."""
        arguments = self.arguments(slot)
        if self._is_empty:
            return slot.stream.launch(self.kernel, *arguments, n=0, block=self.block, shared_bytes=self.shared_bytes)
        return slot.stream.launch(self.kernel, self.grid, self.block, *arguments, shared_bytes=self.shared_bytes)

    def __repr__(self) -> str:
        return f"<Launch {self.kernel.name} grid={self.grid} block={self.block}>"


def _argument(arg: Any, slot: Slot) -> Any:
    if isinstance(arg, SlotBuffer):
        return arg.of(slot)
    return arg(slot) if callable(arg) else arg
