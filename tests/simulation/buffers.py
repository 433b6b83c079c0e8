"""The expected content of buffers: each operation that writes a buffer makes a new version of its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tests.simulation import internals

if TYPE_CHECKING:
    from aiocuda import Device, Stream
    from aiocuda._core import Operation
    from aiocuda.memory._buffer import DeviceBuffer

__all__ = ["TrackedBuffer", "Version"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Version:
    """The content of a buffer after one operation.

    The content is unknown if the operation, or an operation that one of its parents needs, did not succeed.

    Parameters
    ----------
    operation
        The operation that writes the buffer; None for a buffer that nothing has written.
    parents
        The versions that the operation reads.
    compute
        Computes the content from the content of the parents; None if it is unknown.
    """

    __slots__ = ("_compute", "_known", "_value", "operation", "parents")

    def __init__(
        self, operation: Operation[Any] | None, parents: tuple[Version, ...], compute: Callable[..., _Array] | None
    ) -> None:
        self.operation = operation
        self.parents = parents
        self._compute = compute
        self._value: _Array | None = None
        self._known: bool | None = None

    def value(self) -> _Array | None:
        """Return the content; None if it is unknown. To be called when the operation has finished."""
        if self._known is None:
            self._known = self._compute is not None and (self.operation is None or self.operation.state == "done")
            values = [parent.value() for parent in self.parents] if self._known else []
            if any(value is None for value in values):
                self._known = False
            elif self._known and self._compute is not None:
                self._value = self._compute(*values)
            self._compute, self.parents, self.operation = None, (), None
        return self._value


class TrackedBuffer:
    """A buffer, its present version, and the operations that the next use of it has to wait for.

    Attributes
    ----------
    buffer : DeviceBuffer
    home : Stream
        The stream that has allocated it.
    version : Version
        The content after all operations so far.
    writer : Operation or None
        The last operation that writes the buffer.
    readers : dict
        By stream: the last operation that reads the buffer, since the last write.
    """

    def __init__(self, buffer: DeviceBuffer, home: Stream) -> None:
        self.buffer = buffer
        self.home = home
        self.version = Version(None, (), None)
        self.writer: Operation[Any] | None = None
        self.readers: dict[Stream, Operation[Any]] = {}
        self._before_writer: list[Operation[Any]] = []

    @property
    def device(self) -> Device:
        """The device of the buffer."""
        return self.home.device

    def operations_before(self, stream: Stream, writes: bool) -> list[Operation[Any]]:
        """Return what the next operation of a stream has to wait for.

        A read waits for the last write; a write also waits for the reads since then. Operations of the same stream,
        and operations that the host has seen to be done, need no wait.
        """
        waits = [] if self.writer is None else [self.writer]
        if writes:
            waits += self.readers.values()
        if self.writer is not None and internals.has_failed(self.writer):
            waits += self._before_writer  # an operation that did not run has waited for nothing, either
        return [each for each in dict.fromkeys(waits) if each.state != "done" and each.stream is not stream]

    def note_use(self, stream: Stream, operation: Operation[Any], writes: bool) -> None:
        """Note that an operation which uses the buffer has been enqueued."""
        if writes:
            earlier = [*self.operations_before(stream, writes=True), *self._before_writer]
            self._before_writer = [each for each in dict.fromkeys(earlier) if not internals.device_has_finished(each)]
            self.writer = operation
            self.readers.clear()
        else:
            self.readers[stream] = operation
