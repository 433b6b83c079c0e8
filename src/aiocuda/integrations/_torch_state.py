"""The state of a thread that PyTorch's calls depend on: current streams, grad mode, inference mode and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

from ..errors import BusyError

__all__ = ["CurrentStreams", "ModeSwitch", "Modes", "TorchStream", "is_capturing", "set_stream"]

# The functions below PyTorch's own in Python, which take 3 to 15 times as long; or these, where one is missing.

#: Returns CUDA's handle of a device's current stream; Triton uses it, too.
_current_handle: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

#: Returns whether the current stream of the current device is being captured.
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


#: Makes a stream the current one, given its id, its device's index and its device's type.
set_stream: Any = getattr(torch._C, "_cuda_setStream", _set_stream)


def _casts() -> bool:
    return bool(torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


#: Returns whether autocast is enabled for any type of device.
_is_casting: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _casts)


class TorchStream:
    """One of our streams, as PyTorch uses it.

    Attributes
    ----------
    stream : torch.cuda.ExternalStream
        PyTorch's object for the stream.
    index : int
        The index of its device.
    key : tuple of int
        What `set_stream` takes for it.
    """

    __slots__ = ("_current_device", "_default", "_events", "_handle", "_record", "_usual_modes", "_wait", "index",
                 "key", "stream")  # fmt: skip

    def __init__(self, handle: int, index: int) -> None:
        self.stream: Any = torch.cuda.ExternalStream(handle, device=index)
        self.index = index
        # It skips the checks of `torch.cuda.current_device`: PyTorch uses the GPU already.
        self._current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        self.key = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        self._handle = handle
        self._default: Any = torch.cuda.default_stream(index)
        self._events: list[Any] = []
        events: Any = getattr(torch._C, "_CudaEventBase", torch.cuda.Event)  # the part of `Event` in C
        self._record, self._wait = events.record, events.wait
        self._usual_modes: dict[tuple[bool, bool], Modes] = {}

    def state(self) -> tuple[int, Any, Modes]:
        """Return the state of this thread: the current device, this device's current stream, and the modes.

        While no autocast is enabled, the same modes are the same object. The dtypes of autocast are then defaults of
        the thread, which are read once.
        """
        handle = _current_handle(self.index)
        if handle == 0:
            stream = self._default
        else:
            stream = self.stream if handle == self._handle else torch.cuda.current_stream(self.index)
        if _is_casting():
            modes = Modes.of_this_thread()
        else:
            key = is_grad_enabled(), is_inference_mode_enabled()
            modes = self._usual_modes.get(key) or self._usual_modes.setdefault(key, Modes.of_this_thread())
        return self._current_device(), stream, modes

    def record(self, current: Any) -> Any:
        """Return an event after all work of the current stream so far, for `wait_for`."""
        event = self._events.pop() if self._events else torch.cuda.Event()
        self._record(event, current)
        return event

    def wait_for(self, event: Any) -> None:
        """Make our stream wait, on the device, for an event of `record`, which is used again."""
        self._wait(event, self.stream)
        self._events.append(event)

    def refuse_captured(self, current_device: int) -> None:
        """Raise `BusyError` if PyTorch's current stream of the device is being captured."""
        if self.index == current_device:
            captured = is_capturing()
        else:
            with torch.cuda.device(self.index):
                captured = is_capturing()
        if captured:
            raise BusyError(
                "PyTorch's current stream is being captured into a graph, and a wait for it would become part of that "
                "graph: end the capture first"
            )


class CurrentStreams:
    """The current device of the thread, and the current stream of each device."""

    __slots__ = ("device", "streams")

    def __init__(self, device: int, streams: list[Any]) -> None:
        self.device = device
        self.streams = streams

    @classmethod
    def of_this_thread(cls) -> CurrentStreams:
        """Return those of this thread."""
        device = torch.cuda.current_device()
        return cls(device, [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())])

    def restore(self, now: CurrentStreams) -> None:
        """Make them current again, in place of those that are current ``now``."""
        device = now.device
        for index, stream in enumerate(self.streams):
            if now.streams[index] != stream:
                torch.cuda.set_stream(stream)  # makes its device current, too
                device = index
        if device != self.device:
            torch.cuda.set_device(self.device)


class Modes(NamedTuple):
    """The modes of a thread."""

    grad: bool
    inference: bool
    casts_on_cuda: bool  # autocast is enabled
    cuda_dtype: Any
    casts_on_cpu: bool
    cpu_dtype: Any
    cache: bool  # of casts in an autocast region

    @classmethod
    def of_this_thread(cls) -> Modes:
        """Return the modes of this thread."""
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )  # fmt: skip

    @property
    def casts(self) -> bool:
        """True if some autocast is enabled."""
        return self.casts_on_cuda or self.casts_on_cpu


class ModeSwitch:
    """Sets the modes of the thread.

    PyTorch sets the inference mode by guards, and dropping a guard restores the modes of the time when it was made. So
    a switch has at most one guard, which the next call of `to` drops first.
    """

    __slots__ = ("_guard",)

    #: Guards of coroutines that have ended in another mode than that of the thread: dropping them would change it.
    _kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._guard: Any = None

    def __del__(self) -> None:
        if self._guard is not None:
            self._kept.append(self._guard)

    def to(self, modes: Modes, now: Modes | None = None) -> None:
        """Set the modes of this thread, which are ``now`` if the caller knows them."""
        now = Modes.of_this_thread() if now is None else now
        if now.casts or modes.casts:
            torch.clear_autocast_cache()  # its tensors belong to the stream that made them
        if self._guard is None and now == modes:
            return
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.__exit__(None, None, None)
        if torch.is_inference_mode_enabled() != modes.inference:
            self._guard = torch.inference_mode(modes.inference)
            self._guard.__enter__()
        torch.set_grad_enabled(modes.grad)
        torch.set_autocast_enabled("cuda", modes.casts_on_cuda)
        torch.set_autocast_dtype("cuda", modes.cuda_dtype)
        torch.set_autocast_enabled("cpu", modes.casts_on_cpu)
        torch.set_autocast_dtype("cpu", modes.cpu_dtype)
        torch.set_autocast_cache_enabled(modes.cache)
