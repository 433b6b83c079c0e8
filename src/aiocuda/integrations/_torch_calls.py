"""Calls of submitted functions of PyTorch: on a stream, or on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..completion._submission import function_name
from ..errors import BusyError, UnsupportedError
from ._nested import leaves
from ._torch_modes import Modes, ModeSwitch

__all__ = ["OnHost", "OnStream", "record", "record_results"]


class OnStream:
    """A function, with the stream on which it is called and the modes of its caller."""

    def __init__(self, function: Callable[..., Any], ours: Any) -> None:
        caller = torch.cuda.current_stream(ours.device_index)
        self._function = function
        self._ours = ours
        self._caller = None if caller == ours else caller
        self._earlier = None if self._caller is None else record(caller)  # now: the function may be called later
        self._modes = Modes.of_this_thread()
        self.__qualname__ = function_name(function)  # for log events and errors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ours, caller, modes = self._ours, self._caller, self._modes
        before = Modes.of_this_thread()
        switch = None if modes == before else ModeSwitch()
        device, current = torch.cuda.current_device(), torch.cuda.current_stream(ours.device_index)
        torch.cuda.set_stream(ours)
        try:
            if switch is not None:
                switch.to(modes)
            if modes.casts:
                torch.clear_autocast_cache()  # its tensors belong to another stream
            if self._earlier is not None:
                ours.wait_event(self._earlier)
            result = self._function(*args, **kwargs)
            if caller is not None:
                record_results(result, caller)
            return result
        finally:
            if modes.casts:
                torch.clear_autocast_cache()
            if switch is not None:
                switch.to(before)
            torch.cuda.set_stream(current)
            if device != ours.device_index:
                torch.cuda.set_device(device)


class OnHost:
    """A function with the modes of its caller, for a thread of a driver without a GPU."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._modes = Modes.of_this_thread()
        self.__qualname__ = function_name(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        switch, before = ModeSwitch(), Modes.of_this_thread()
        switch.to(self._modes)
        try:
            return self._function(*args, **kwargs)
        finally:
            switch.to(before)


def record(current: Any) -> Any:
    """Return an event after all work of a current stream. Raise `BusyError` if the stream is being captured."""
    with torch.cuda.device(current.device_index):
        if torch.cuda.is_current_stream_capturing():
            raise BusyError(
                "PyTorch's current stream is being captured into a graph, and a wait for it would become part of that "
                "graph: end the capture first"
            )
    return current.record_event()


def record_results(result: Any, caller: Any) -> None:
    """Record the tensors of a result for a stream: PyTorch reuses their memory only after its work."""
    for tensor in leaves(result, torch.Tensor):
        for part in _strided_parts(tensor):
            if part.is_cuda and part.device == caller.device:
                part.record_stream(caller)


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
