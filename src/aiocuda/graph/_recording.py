"""Recording: a stream while it is captured. The same verbs; each of them records, or says why it cannot.

The stream becomes this class for that time. Its queue is `recorded`: it refuses what would reach the device by another
way, such as a method that was bound to a name before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..completion._operation import Operation
from ..errors import BusyError, InvalidTypeError, UnsupportedError
from ..memory._buffer import DeviceBuffer
from ..stream import Stream
from ._captured import CAPTURED, Captured
from ._steps import copy_step, fill_step, launch_step

if TYPE_CHECKING:
    from ..kernels import Kernel
    from ._capture import Capture
    from ._recorder import Recorder

__all__ = ["Recording"]


class Recording(Stream):
    """A stream that is captured."""

    _recorder: Recorder

    def _refuse(self, what: str, cure: str) -> NoReturn:
        raise UnsupportedError(f"{self.name} is being captured, and {what} cannot be part of a graph: {cure}")

    # -- recorded ------------------------------------------------------------------------------------------------

    def launch(
        self, kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], *args: Any, shared_bytes: int = 0
    ) -> Operation[None]:
        """Record a launch."""
        self._recorder.check(self)
        return self._recorder.add(self, launch_step(self.device, kernel, grid, block, args, shared_bytes))

    def copy(self, target: Any, source: Any) -> Operation[None]:
        """Record a copy."""
        self._recorder.check(self)
        return self._recorder.add(self, copy_step(self.device, target, source))

    def download(self, buffer: DeviceBuffer, out: npt.NDArray[Any] | None = None) -> Operation[npt.NDArray[Any]]:
        """Record a copy into ``out``, which has to be pinned."""
        self._recorder.check(self)
        if not isinstance(buffer, DeviceBuffer):
            raise InvalidTypeError(f"download takes a device buffer, not {type(buffer).__name__}")
        if out is None:
            self._refuse(
                "a new array for each download",
                f"give it one, `stream.download(buffer, out=device.pinned({buffer.shape}, {str(buffer.dtype)!r}))`",
            )
        captured = self._recorder.add(self, copy_step(self.device, out, buffer))
        captured.value = out  # what a launch's result would be, for those who launch it in its place
        return captured

    def fill(self, buffer: DeviceBuffer, value: object) -> Operation[None]:
        """Record a fill."""
        self._recorder.check(self)
        return self._recorder.add(self, fill_step(self.device, buffer, value))

    def wait(self, other: Any) -> Operation[None]:
        """Record that later steps come behind something that is captured, too."""
        self._recorder.check(self)
        operation = other._end() if isinstance(other, Stream) else getattr(other, "operation", other)
        if isinstance(operation, Captured):
            return self._recorder.wait(self, operation)
        if operation is not None and not isinstance(operation, Operation):
            raise InvalidTypeError(f"a stream waits for an operation, an event or a stream, not {type(other).__name__}")
        self._refuse(
            f"a wait for {other!r}, which is not captured,",
            "let the stream wait for it, then launch the graph on it",
        )

    def synchronize(self) -> Operation[None]:
        """Record a place that others can wait for."""
        self._recorder.check(self)
        return self._recorder.head(self, "synchronize")

    def _end(self) -> Operation[Any] | None:
        return self._recorder.head(self, "wait")

    # -- refused -------------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> DeviceBuffer:
        """`UnsupportedError`."""
        self._refuse("an allocation", "make the buffer before the `with` block")

    def empty_like(self, array: npt.ArrayLike | DeviceBuffer) -> DeviceBuffer:
        """`UnsupportedError`."""
        self._refuse("an allocation", "make the buffer before the `with` block")

    def upload(self, array: Any) -> Operation[DeviceBuffer]:
        """`UnsupportedError`."""
        self._refuse("a new buffer", "make it before the `with` block, then `stream.copy(buffer, pinned_array)`")

    def prefetch(self, buffer: Any, to: Any = "device") -> Operation[None]:
        """`UnsupportedError`."""
        self._refuse("a prefetch", "prefetch before or behind its launch")

    def record(self, timing: bool = False, *, event: Any = None) -> Any:
        """`UnsupportedError`."""
        self._refuse("an event", "let other streams wait for what a verb returns, or for this stream")

    def add_callback(self, fn: Any, *, context: Any = None) -> Operation[None]:
        """`UnsupportedError`."""
        self._refuse("a callback", "add it to what graph.launch(stream) returns")

    def _busy(self) -> NoReturn:
        raise BusyError(f"{self.name} is being captured: leave the `with stream.capture()` block first")

    def capture(self) -> Capture:
        """`BusyError`."""
        self._busy()

    def lend(self) -> AbstractAsyncContextManager[int]:
        """`BusyError`."""
        self._busy()

    def __cuda_stream__(self) -> tuple[int, int]:
        """`BusyError`."""
        self._busy()

    async def aclose(self) -> None:
        """`BusyError`."""
        self._busy()


assert CAPTURED < 0  # by which `Stream.wait` knows what is captured
