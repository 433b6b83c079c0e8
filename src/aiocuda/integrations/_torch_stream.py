"""TorchStream: one of our streams, as PyTorch uses it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BusyError

__all__ = ["TorchStream"]

#: Returns CUDA's handle of a device's current stream; Triton uses it, too. It takes 0.1 µs, `current_stream` 1.5 µs.
_current_handle: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class TorchStream:
    """One of our streams, as PyTorch uses it.

    Attributes
    ----------
    stream : torch.cuda.ExternalStream
        PyTorch's object for the stream.
    index : int
        The index of its device.
    """

    __slots__ = ("_default", "_events", "_handle", "index", "stream")

    def __init__(self, handle: int, index: int) -> None:
        self.stream: Any = torch.cuda.ExternalStream(handle, device=index)
        self.index = index
        self._handle = handle
        self._default: Any = torch.cuda.default_stream(index)
        self._events: list[Any] = []

    def current(self) -> Any:
        """Return PyTorch's current stream of the device."""
        if _current_handle is not None:
            handle = _current_handle(self.index)
            if handle == self._handle:
                return self.stream
            if handle == 0:
                return self._default
        return torch.cuda.current_stream(self.index)

    def record(self, current: Any) -> Any:
        """Return an event after all work of the current stream."""
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(current)
        return event

    def wait(self, event: Any) -> None:
        """Make our stream wait for an event of `record`, which is used again."""
        self.stream.wait_event(event)
        self._events.append(event)

    def refuse_captured(self, current_device: int) -> None:
        """Raise `BusyError` if PyTorch's current stream of the device is being captured."""
        if self.index == current_device:
            captured = torch.cuda.is_current_stream_capturing()
        else:
            with torch.cuda.device(self.index):
                captured = torch.cuda.is_current_stream_capturing()
        if captured:
            raise BusyError(
                "PyTorch's current stream is being captured into a graph, and a wait for it would become part of that "
                "graph: end the capture first"
            )
