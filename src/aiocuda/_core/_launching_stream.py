"""LaunchingStream: the launch of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

from .._base._label import check_label
from ._operation import Operation

if TYPE_CHECKING:
    from ..device.streams._hook import StreamHook
    from ..device.streams._launches import Launches
    from ..kernels import Kernel

__all__ = ["LaunchingStream"]


class LaunchingStream:
    """The launch of `aiocuda.Stream`; the base class of that."""

    __slots__ = ("_launches",)

    _launches: Launches

    if TYPE_CHECKING:
        #: Runs in place of each method, if there is one: see `StreamHook`. Not in C: Python reads it more often.
        _hook: StreamHook | None

    def launch(
        self, kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], *args: Any, shared_bytes: int = 0,
        label: str | None = None, **unknown: Never,
    ) -> Operation[None]:  # fmt: skip
        """Run a kernel. ``cuLaunchKernelEx``.

        Parameters
        ----------
        kernel
            The first launch compiles and loads it on a worker thread, and waits for that in its place in the stream.
        grid, block
            Blocks, and threads per block: an integer, or one to three of them.
        *args
            One for each of the kernel's parameters: buffers for pointers, numbers for scalars.
        shared_bytes
            Dynamic shared memory per block.
        label
            The label of this operation, see `aiocuda.label`.
        **unknown
            There are none: a keyword of another library raises `InvalidTypeError` with the cure.
        """
        if unknown or self._hook is not None:
            return self._launch_unusual(kernel, grid, block, args, shared_bytes, label, unknown)
        launches = self._launches
        bound = launches.last
        if (
            bound is None
            or kernel is not launches.kernel
            or grid is not launches.grid
            or block is not launches.block
            or shared_bytes is not launches.shared_bytes
        ):
            if not launches.find(kernel, grid, block, shared_bytes):
                return launches.launch_first(kernel, grid, block, args, shared_bytes, label)
            bound = launches.last
            assert bound is not None
        if label is not None and (type(label) is not str or not label):
            label = check_label(label)
        operation = bound.repeat(args, label) if bound.converters or args else bound.enqueue((), args, label)
        if operation is None:
            return launches.launch_unused(bound, args, None, label)
        launches.launches += 1
        return operation

    if TYPE_CHECKING:

        def _launch_unusual(
            self, kernel: Kernel, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int, label: str | None,
            unknown: dict[str, Any],
        ) -> Operation[None]: ...  # fmt: skip
