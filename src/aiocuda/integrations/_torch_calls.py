"""Calls of submitted functions of PyTorch: on a stream, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import UnsupportedError
from ._nested import leaves
from ._torch_modes import Modes, ModeSwitch
from ._torch_stream import TorchStream

__all__ = ["OnHost", "OnStream", "parts_on"]


class OnStream:
    """One call of a function of PyTorch on a stream.

    Usually the stream calls the function during `aiocuda.Stream.submit`, in the state of the caller. Otherwise
    `defer` has to note that state: the function is called later, while other code has the thread.
    """

    __slots__ = ("_caller", "_device", "_earlier", "_function", "_modes", "_parts", "_theirs", "called")

    def __init__(self, function: Callable[..., Any], theirs: TorchStream) -> None:
        self._function = function
        self._theirs = theirs
        self._device = torch.cuda.current_device()
        self._caller = theirs.current()
        self._earlier: Any = None  # an event after the caller's work so far
        self._modes: Modes | None = None
        self._parts: list[Any] | None = None  # of the result
        self.called = False
        if self._caller is theirs.stream:
            self._caller = None
        else:
            theirs.refuse_captured(self._device)

    def defer(self) -> None:
        """Note the state of the caller: the function will be called later."""
        self._modes = Modes.of_this_thread()
        if self._caller is not None:
            self._earlier = self._theirs.record(self._caller)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and return its result."""
        self.called = True
        theirs = self._theirs
        if self._modes is None:
            return self._call(self._device, self._caller, args, kwargs)
        device, current = torch.cuda.current_device(), theirs.current()
        before = Modes.of_this_thread()
        if before == self._modes and not before.casts:
            return self._call(device, current, args, kwargs)
        switch = ModeSwitch()
        switch.to(self._modes, before)
        try:
            return self._call(device, current, args, kwargs)
        finally:
            switch.to(before)

    def done(self, result: Any) -> None:
        """Record the tensors of the result for the caller's stream, now that the device has finished.

        Not earlier: if the device faults, PyTorch ends the process when it frees a tensor that was recorded.
        """
        if self._parts is not None:
            for part in self._parts:
                part.record_stream(self._caller)

    def _call(self, device: int, current: Any, args: Any, kwargs: Any) -> Any:
        """Call the function on our stream; ``device`` and ``current`` are then current again."""
        theirs, caller = self._theirs, self._caller
        casts = False
        if caller is not None:
            theirs.wait(self._earlier or theirs.record(caller))
            casts = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        torch.cuda.set_stream(theirs.stream)
        try:
            if casts:
                torch.clear_autocast_cache()  # its tensors belong to another stream
            result = self._function(*args, **kwargs)
            if caller is not None and result is not None:
                self._parts = list(parts_on(result, theirs.stream.device))
            return result
        finally:
            if casts:
                torch.clear_autocast_cache()
            torch.cuda.set_stream(theirs.stream if current is None else current)
            if device != theirs.index:
                torch.cuda.set_device(device)


class OnHost:
    """One call of a function of PyTorch, in the modes of its caller, on a thread of a driver without a GPU."""

    __slots__ = ("_function", "_modes")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._modes = Modes.of_this_thread()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and return its result."""
        switch, before = ModeSwitch(), Modes.of_this_thread()
        switch.to(self._modes, before)
        try:
            return self._function(*args, **kwargs)
        finally:
            switch.to(before)


def parts_on(result: Any, device: Any) -> Iterator[Any]:
    """Yield the tensors that hold the memory of a nested result on a device."""
    for tensor in leaves(result, torch.Tensor):
        for part in _strided_parts(tensor):
            if part.device == device:
                yield part


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
