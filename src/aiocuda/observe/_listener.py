"""DeviceListener: the base of `StreamProfiler` and `Timeline`."""

from __future__ import annotations

import abc
import contextlib
from typing import Any, ClassVar

from .._base._mistakes import refuses
from .._base._types import SourceLine
from ..completion import INTERNAL, Instrument, Operation
from ..device import Device
from ..errors import AiocudaError, InvalidTypeError

__all__ = ["DeviceListener", "elapsed_ms"]


@refuses(__enter__="is entered by `async with`, not `with`")
class DeviceListener(Instrument, abc.ABC):
    """An `Instrument` that is registered with its device for one ``async with`` block, and gets the device times.

    It recognises the chunks of a staged copy, leaves out the library's internal events, and passes all other operations
    to `_on_finished`. A subclass registers itself in ``__aenter__``, with ``self._listening`` for the end.
    """

    timing = True

    #: Ids of the operations by which timelines begin. No listener of the library reports them.
    _own_operations: ClassVar[set[int]] = set()

    #: Name of the class in error messages.
    _noun: ClassVar[str]

    def __init__(self, device: Device) -> None:
        if not isinstance(device, Device):
            raise InvalidTypeError(f"a {self._noun} listens to an aiocuda.Device, not {type(device).__name__}")
        self.device = device
        self._listening: contextlib.ExitStack | None = None  # until the first block
        self._copy_of_chunk: dict[int, int] = {}  # operation ids

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is None:
                await self.device.drain()
        finally:
            self.stop()

    def stop(self) -> None:
        """End the block without waiting for operations. Any thread may call it; a second call does nothing."""
        if self._listening is not None:
            self._listening.close()
        self._copy_of_chunk.clear()
        self._on_stopped()

    def _check_entered(self) -> None:
        """Warn if there was no block: a result would be empty."""
        if self._listening is None:
            name = type(self).__name__
            SourceLine.of_caller().warn(
                f"this {self._noun} was never entered, so it has recorded nothing: "
                f"`async with {name}(device) as {self._noun}`", RuntimeWarning,
            )  # fmt: skip

    def on_submit(self, operation: Operation[Any]) -> None:
        """Remember the copy of a chunk. The hook of `Instrument` for an accepted operation."""
        copy = operation.part_of
        if copy is not None:
            self._copy_of_chunk[operation.id] = copy.id

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        """Pass a finished operation on. The hook of `Instrument` for a finished operation."""
        copy = self._copy_of_chunk.pop(operation.id, None)
        if copy is None and (operation.kind == INTERNAL or operation.id in self._own_operations):
            self._on_internal(operation)
        else:
            self._on_finished(operation, copy, start, end)

    def _on_internal(self, operation: Operation[Any]) -> None:
        """Handle the end of an operation that the library has enqueued for itself."""

    @abc.abstractmethod
    def _on_finished(self, operation: Operation[Any], copy: int | None, start: int, end: int) -> None:
        """Handle a finished operation, with the id of the staged copy that it is a chunk of, or None.

        ``start`` and ``end`` are the timing events before and after the operation, 0 for none.
        """

    @abc.abstractmethod
    def _on_stopped(self) -> None:
        """Handle the end of the block, after the last operation."""


def elapsed_ms(device: Device, start: int, end: int) -> float | None:
    """Return the milliseconds between two timing events; None after a device fault, which every waiter gets."""
    try:
        return device.driver.event_elapsed_ms(start, end)
    except AiocudaError:
        return None
