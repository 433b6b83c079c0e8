"""Functions and coroutines of PyTorch on a stream: calls of submitted functions, and steps of coroutines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from ..errors import UnsupportedError
from ..lowlevel import Queue, end_step
from ._library import Call, leaves
from ._torch_state import CurrentStreams, Modes, ModeSwitch, TorchStream

__all__ = ["CallOnHost", "CallOnStream", "TorchStep"]


class CallOnStream(Call[TorchStream]):
    """One call of a function of PyTorch on a stream, in the modes of its caller."""

    __slots__ = ("_caller", "_current", "_device", "_earlier", "_modes", "_parts", "needs_state")

    def __init__(self, function: Callable[..., Any], theirs: TorchStream) -> None:
        self._function = function
        self._theirs = theirs
        self._device = theirs.current_device()
        self._current = theirs.current()
        self._earlier: Any = None  # an event after the caller's work, from `note_state`
        self._modes: Modes | None = None  # of the caller, from `note_state`
        self._parts: list[Any] | None = None  # of the result
        self.needs_state = True
        if self._current is theirs.stream:
            self._caller: Any = None  # the stream of the caller, if it is another one
        else:
            self._caller = self._current
            theirs.refuse_captured(self._device)

    def note_state(self) -> None:
        self._modes = Modes.of_this_thread()
        if self._caller is not None:
            self._earlier = self._theirs.record(self._caller)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.needs_state = False
        if self._modes is not None:
            modes, self._modes = self._modes, None
            return self._run_in_modes(modes, args, kwargs)
        theirs, caller = self._theirs, self._caller
        casts = False
        if caller is not None:
            if self._earlier is None:
                theirs.wait_for_work(caller)
            else:
                theirs.wait_for(self._earlier)
            casts = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        torch.cuda.set_stream(theirs.stream)
        try:
            if casts:
                torch.clear_autocast_cache()  # its tensors belong to another stream
            result = self._function(*args, **kwargs)
            if caller is not None and result is not None:
                self._parts = parts_on(result, theirs.stream.device)
            return result
        finally:
            if casts:
                torch.clear_autocast_cache()
            torch.cuda.set_stream(self._current)
            if self._device != theirs.index:
                torch.cuda.set_device(self._device)

    def _run_in_modes(self, modes: Modes, args: Any, kwargs: Any) -> Any:
        """Do the same as `run` in these modes: the thread has those of other code."""
        self._device, self._current = self._theirs.current_device(), self._theirs.current()
        before = Modes.of_this_thread()
        if before == modes and not before.casts:
            return self.run(*args, **kwargs)
        switch = ModeSwitch()
        switch.to(modes, before)
        try:
            return self.run(*args, **kwargs)
        finally:
            switch.to(before)

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

    def __init__(self, function: Callable[..., Any], theirs: None) -> None:
        super().__init__(function, theirs)
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
                    theirs.wait_for_work(caller)
                torch.cuda.set_stream(theirs.stream)
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
