"""Functions and coroutines of PyTorch on a stream: calls of submitted functions, and steps of coroutines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from ..errors import UnsupportedError
from ..lowlevel import Queue, end_step
from ._library import Call, leaves
from ._torch_state import CurrentStreams, Modes, ModeSwitch, TorchStream, is_capturing, set_stream

__all__ = ["CallOnHost", "CallOnStream", "TorchStep"]


class CallOnStream(Call[TorchStream]):
    """One call of a function of PyTorch on a stream, in the modes of its caller."""

    __slots__ = ("_caller", "_earlier", "_modes", "_parts")

    def __init__(self, function: Callable[..., Any], theirs: TorchStream, index: int) -> None:
        self._function = function
        self._theirs = theirs
        self._parts: list[Any] | None = None  # of the result
        device, caller, self._modes = theirs.state()
        if caller is theirs.stream:
            self._caller: Any = None  # the stream of the caller, if it is another one
            return
        if device != theirs.index or is_capturing():
            theirs.refuse_captured(device)
        self._caller = caller
        self._earlier = theirs.record(caller)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        theirs, caller, modes = self._theirs, self._caller, self._modes
        device, current, before = theirs.state()  # of other code, if the function has waited on the host
        if caller is not None:
            theirs.wait_for(self._earlier)
        switch = None
        if before is not modes:  # or autocast is enabled
            switch = ModeSwitch()
            switch.to(modes, before)
        set_stream(*theirs.key)
        try:
            result = self._function(*args, **kwargs)
            if caller is not None and result is not None:
                self._parts = parts_on(result, theirs.stream.device)
            return result
        finally:
            if switch is not None:
                switch.to(before)
            set_stream(current.stream_id, current.device_index, current.device_type)
            if device != theirs.index:
                torch.cuda.set_device(device)

    def on_result(self, result: Any) -> None:
        """Record the tensors of the result for the caller's stream, now that the device has finished.

        Not earlier: if the device faults, PyTorch ends the process when it frees a tensor that was recorded.
        """
        if self._parts is not None:
            for part in self._parts:
                part.record_stream(self._caller)


class CallOnHost(Call[None]):
    """One call of a function of PyTorch, in the modes of its caller, on a thread of a driver without a GPU."""

    __slots__ = ("_modes",)

    def __init__(self, function: Callable[..., Any], theirs: None, index: int) -> None:
        super().__init__(function, theirs, index)
        self._modes = Modes.of_this_thread()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        switch, before = ModeSwitch(), Modes.of_this_thread()
        switch.to(self._modes, before)
        try:
            return self._function(*args, **kwargs)
        finally:
            switch.to(before)


class TorchStep:
    """PyTorch's state of the thread during the steps of one coroutine: `aiocuda.integrations.torch.on`."""

    def __init__(self, queue: Queue, theirs: TorchStream | None) -> None:
        queue.check()
        self._queue = queue
        self._theirs = theirs  # None without a GPU
        self._modes: Modes | None = None  # as the coroutine last had them; None before its first step
        self._switch = ModeSwitch()
        self._streams: CurrentStreams | None = None

    def __enter__(self) -> Self:
        self._outer_modes = Modes.of_this_thread()
        theirs = self._theirs
        if theirs is not None:
            outer = self._outer_streams = CurrentStreams.of_this_thread()
            if self._streams is None:
                caller = outer.streams[theirs.index]
                if caller != theirs.stream:
                    theirs.refuse_captured(outer.device)
                    theirs.wait_for(theirs.record(caller))
                set_stream(*theirs.key)
            else:
                self._streams.restore(outer)
        if self._modes is not None:
            self._switch.to(self._modes, self._outer_modes)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._modes = Modes.of_this_thread()
        self._switch.to(self._outer_modes, self._modes)
        theirs = self._theirs
        if theirs is None:
            return
        self._streams = CurrentStreams.of_this_thread()
        self._outer_streams.restore(self._streams)
        if isinstance(error, StopIteration) and error.value is not None:  # the coroutine has returned
            for part in parts_on(error.value, theirs.stream.device):
                part.record_stream(self._outer_streams.streams[theirs.index])
        end_step(self._queue)


def parts_on(result: Any, device: Any) -> list[Any]:
    """Return the tensors that hold the memory of a nested result on a device."""
    tensors = (result,) if isinstance(result, torch.Tensor) else leaves(result, torch.Tensor)
    return [part for tensor in tensors for part in _strided_parts(tensor) if part.device == device]


def _strided_parts(tensor: Any) -> tuple[Any, ...]:
    """Return the tensors that hold the memory of a tensor: a sparse one consists of several."""
    layout = tensor.layout
    if layout == torch.strided:
        return (tensor,)
    if layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    if layout == torch.jagged:
        return (tensor.values(), tensor.offsets())
    raise UnsupportedError(f"results of layout {layout} cannot be recorded for a stream: return their parts")
