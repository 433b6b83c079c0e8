"""What ought to stand in a buffer: each operation on it makes a version, which knows how it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ..._device import Device
    from ...completion._operation import Operation
    from ...memory._buffer import DeviceBuffer
    from ...stream import Stream

__all__ = ["Tracked", "Version"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Version:
    """The content behind one operation; unknown if that, or one that it stands on, did not succeed."""

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
        """What stands there, once all is done; None where nobody can say."""
        if self._known is None:
            self._known = self._compute is not None and (self.operation is None or self.operation.state == "done")
            values = [parent.value() for parent in self.parents] if self._known else []
            if any(value is None for value in values):
                self._known = False
            elif self._known and self._compute is not None:
                self._value = self._compute(*values)
            self._compute, self.parents, self.operation = None, (), None
        return self._value


class Tracked:
    """A buffer of the program, its present version, and who used it last in each stream."""

    def __init__(self, buffer: DeviceBuffer, home: Stream) -> None:
        self.buffer = buffer
        self.home = home
        self.version = Version(None, (), None)
        self.writer: Operation[Any] | None = None
        self.readers: dict[Stream, Operation[Any]] = {}
        self._before_writer: list[Operation[Any]] = []

    @property
    def device(self) -> Device:
        """Where it is."""
        return self.home.device

    def before(self, stream: Stream, writes: bool) -> list[Operation[Any]]:
        """What an operation of a stream must come behind: the last write, and the reads if it writes itself."""
        waits = [] if self.writer is None else [self.writer]
        if writes:
            waits += self.readers.values()
        if self.writer is not None and self.writer.failure is not None:
            waits += self._before_writer  # what did not run has waited for nothing, either
        return [each for each in dict.fromkeys(waits) if each.state != "done" and each.stream is not stream]

    def used(self, stream: Stream, operation: Operation[Any], writes: bool) -> None:
        """An operation has been enqueued."""
        if writes:
            earlier = [*self.before(stream, writes=True), *self._before_writer]
            self._before_writer = [each for each in dict.fromkeys(earlier) if not each.is_settled]
            self.writer = operation
            self.readers.clear()
        else:
            self.readers[stream] = operation
