"""EnqueuingStream: the launch and the copy of a stream. NewestLaunch: what each launch compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._base._label import check_label
from ._operation import Operation

if TYPE_CHECKING:
    from ._bound_call import BoundLaunch

__all__ = ["EnqueuingStream", "NewestLaunch"]


class NewestLaunch:
    """The newest launch of a stream, and its arguments. `aiocuda.device.streams._launches.Launches` holds and sets it.

    A launch first compares its own arguments with these, before it looks into the dict `Launches.bound`: 60 ns faster.

    Attributes
    ----------
    bound : BoundLaunch or None
        The newest launch, with all that repeats bound; None before the first.
    kernel, grid, block, shared_bytes
        Its arguments, as the program has passed them.
    launches : int
        How many launches the stream has enqueued.
    """

    __slots__ = ("block", "bound", "grid", "kernel", "launches", "shared_bytes")

    def __init__(self) -> None:
        self.launches = 0
        self.set(None, None, None, None, None)

    def set(self, bound: BoundLaunch | None, kernel: Any, grid: Any, block: Any, shared_bytes: Any) -> None:
        """Set another launch as the newest one."""
        self.bound, self.kernel, self.grid, self.block, self.shared_bytes = bound, kernel, grid, block, shared_bytes


class EnqueuingStream:
    """The launch and the copy of `aiocuda.Stream`; the base class of that."""

    __slots__ = ("_hook", "_launches", "_newest", "_transfers")

    #: Runs in place of each method, if there is one: see `StreamHook`.
    _hook: Any
    _launches: Any
    _newest: NewestLaunch
    _transfers: Any

    def launch(
        self, kernel: Any = None, grid: Any = None, block: Any = None, /, *args: Any, shared_bytes: int = 0,
        label: str | None = None, **unknown: Any,
    ) -> Operation[None]:  # fmt: skip
        """Run a kernel: ``launch(kernel, grid, block, *args)`` or ``launch(kernel, *args, n=count, block=256)``.

        It calls ``cuLaunchKernelEx``.

        Parameters
        ----------
        kernel
            The first launch compiles and loads it on a worker thread, and waits for that in its place in the stream.
        grid, block
            Blocks, and threads per block: an integer, or one to three of them.
        *args
            One for each of the kernel's parameters: buffers for pointers, numbers for scalars.
        n
            The least number of threads, in place of ``grid``: ⌈n / block⌉ blocks are launched, and the kernel compares
            its index with the number that it is given. All positional arguments are then the kernel's, and ``block=``
            is one integer. With 0, no kernel is launched: the operation is done when all earlier work is.
        shared_bytes
            Dynamic shared memory per block.
        label
            The label of this operation, see `aiocuda.label`.
        **unknown
            ``n``, or ``kernel``, ``grid`` and ``block`` by name. A keyword of another library raises
            `InvalidTypeError` with the cure.
        """
        if unknown or self._hook is not None:  # rare: `aiocuda.Stream` has the method
            return self._launch_unusual(kernel, grid, block, args, shared_bytes, label, unknown)
        newest = self._newest
        bound = newest.bound
        if (  # by identity, which is quick; `find` compares by value
            bound is None
            or kernel is not newest.kernel
            or grid is not newest.grid
            or block is not newest.block
            or shared_bytes is not newest.shared_bytes
        ):
            if self._launches.find(kernel, grid, block, shared_bytes) is None:
                return self._launches.launch_first(kernel, grid, block, args, shared_bytes, label)  # type: ignore[no-any-return]
            bound = newest.bound  # `find` has set it; the compiled form would not know the type of its result
            assert bound is not None
        if label is not None and (type(label) is not str or not label):
            label = check_label(label)
        operation: Operation[None] | None
        operation = bound.repeat(args, label) if bound.converters or args else bound.enqueue((), args, label)
        if operation is None:  # it uses memory that is new to the stream
            return self._launches.launch_unused(bound, args, None, label)  # type: ignore[no-any-return]
        newest.launches += 1
        return operation

    def copy(self, target: Any, source: Any, *, label: str | None = None) -> Operation[None]:
        """Copy between host and device, or between device buffers, of one device or of two.

        Both sides have the same dtype and the same shape; raw bytes, one-dimensional uint8, fit any of as many bytes.
        The host side is what `upload` takes, and writable if it is the target. It is borrowed until the operation is
        done.

        Raises
        ------
        InvalidArgumentError
            Sizes or shapes differ; the two overlap; an array is not C-contiguous, or read-only and to be written;
            neither side is device memory.
        InvalidTypeError
            Dtypes differ, or something that cannot be copied.
        BusyError
            Another copy is writing the array, or part of it. (The device may read a pinned array after that copy, in
            the order of streams.)
        """
        if label is not None or self._hook is not None:  # rare: `aiocuda.Stream` has the method
            return self._copy_unusual(target, source, label)
        return self._transfers.copy(target, source)  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        def _copy_unusual(self, target: Any, source: Any, label: str | None) -> Operation[None]: ...

        def _launch_unusual(
            self, kernel: Any, grid: Any, block: Any, args: tuple[Any, ...], shared_bytes: int, label: str | None,
            unknown: dict[str, Any],
        ) -> Operation[None]: ...  # fmt: skip
