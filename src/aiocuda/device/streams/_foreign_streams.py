"""ForeignStreams: another library's objects for our streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ...errors import InvalidTypeError, UnsupportedError
from ._stream import Stream

__all__ = ["ForeignStreams"]

T = TypeVar("T")


class ForeignStreams(Generic[T]):
    """Another library's objects for our streams, one for each stream queue.

    Parameters
    ----------
    library
        The library's name in errors.
    make
        Makes the object, of CUDA's handle and the device's index.
    """

    def __init__(self, library: str, make: Callable[[int, int], T]) -> None:
        self._library = library
        self._make = make

    def of(self, stream: Stream) -> T:
        """Return the library's object for a stream. Raise `UnsupportedError` if its device is no GPU."""
        made = self.if_on_gpu(stream)
        if made is None:
            driver = stream.device.driver.name
            raise UnsupportedError(
                f"{self._library} computes on a GPU, and {stream.name} belongs to the {driver} driver: open the device "
                "with driver='cuda'"
            )
        return made

    def if_on_gpu(self, stream: object) -> T | None:
        """Return the library's object for a stream; None if its device is no GPU. Raise the fault of a device."""
        if not isinstance(stream, Stream):
            raise InvalidTypeError(f"this takes an aiocuda.Stream, not {stream!r}: device.stream() makes one")
        queue = stream._queue
        made: T | None = queue.rare.foreign.get(self)
        if made is None and queue.driver.name != "cuda":
            return None
        fault = queue.driver.fault
        if fault is not None:  # before the other library raises its own error for it
            raise fault.again()
        if made is None:
            # From here on the stream is never destroyed, because the other library may use it at any time.
            handle = queue.driver.stream_handle(queue.handle)
            made = queue.rare.foreign[self] = self._make(handle, queue.device_state.device)
        return made
