"""The work of other libraries: what their objects stand for, and whether one captures a stream into a graph.

A library is not imported here: if there is an object of it, it is in `sys.modules`. The functions named like libraries
return the work of an object of that library, or None if the object is none that they know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from ..driver.protocol import Driver
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError

__all__ = ["Work", "by_methods", "handle_of", "is_captured", "work_of"]

#: Parts of PyTorch with a current stream, for tensors of the CPU: a copy to them may be in flight.
_ACCELERATORS: Final = ("cuda", "xpu", "npu")

#: The driver's answer for a default stream while a stream that waits for it is captured.
STREAM_CAPTURE_IMPLICIT = 906


class Work(NamedTuple):
    """What ends a wait for an object of another library.

    Attributes
    ----------
    kind : str
        ``"stream"`` or ``"event"``, with CUDA's handle; ``"poll"`` or ``"block"``, with a function; ``"done"``.
    handle : int
    device : int or None
        The index of the device, if the library says it.
    source : object
        The library's stream or event. Where CUDA cannot be used, `by_methods` polls it.
    function : callable or None
        For ``"poll"`` it returns True when the work is done; for ``"block"`` it returns then.
    """

    kind: Literal["stream", "event", "poll", "block", "done"]
    handle: int = 0
    device: int | None = None
    source: object = None
    function: Callable[[], object] | None = None


def work_of(x: Any) -> Work | None:
    """Return the work that an object stands for; None if no way is known to wait for it.

    The first way that fits is taken: the library of its class or of a base class, ``__cuda_stream__``, the stream of
    ``__cuda_array_interface__``, its methods.

    Raises
    ------
    InvalidArgumentError
        It is an event that was never recorded.
    InvalidTypeError
        It is an array that names no stream.
    """
    for module in dict.fromkeys(kind.__module__.partition(".")[0] for kind in type(x).__mro__):  # each once
        reader = _READERS.get(module)
        work = None if reader is None else reader(x)
        if work is not None:
            return work
    if isinstance(x, type):  # a class has the attributes, but is no stream
        return None
    if hasattr(x, "__cuda_stream__"):
        return Work("stream", handle_of(x), None, x)
    if hasattr(x, "__cuda_array_interface__"):
        handle = x.__cuda_array_interface__.get("stream")
        if handle is None:
            raise InvalidTypeError(
                f"__cuda_array_interface__ of {type(x).__qualname__} names no stream: wait for the stream itself, "
                "or for a function that says whether it is ready"
            )
        return Work("stream", int(handle))
    return by_methods(x)


def by_methods(x: Any) -> Work | None:
    """Return the work of an object with ``query``, or else with ``synchronize``; None if it has neither.

    Not by ``wait``: that of PyTorch and Numba makes a stream wait, and returns at once.
    """
    if callable(getattr(x, "record_event", None)):  # a stream may get more work: wait for an event that is recorded now
        x = x.record_event()
    if callable(getattr(x, "query", None)):
        return Work("poll", function=x.query)
    return Work("block", function=x.synchronize) if callable(getattr(x, "synchronize", None)) else None


def _torch(x: Any) -> Work | None:
    """Return the work of a tensor, an event or a stream of PyTorch; of other objects of it None."""
    torch = sys.modules["torch"]
    if isinstance(x, torch.Tensor):
        return _tensor(torch, x.device)
    if hasattr(x, "cuda_event"):
        if not x.cuda_event:  # PyTorch makes the event of CUDA when it is recorded first
            raise InvalidArgumentError("this event was never recorded: call event.record() first")
        kind: Literal["stream", "event"] = "event"
        handle = x.cuda_event
    elif hasattr(x, "cuda_stream"):
        kind, handle = "stream", x.cuda_stream
    else:
        return None
    if getattr(torch.version, "hip", None):  # an AMD GPU: the handle is none of CUDA
        return by_methods(x)
    return Work(kind, handle, None if x.device is None else x.device.index, x)


def _tensor(torch: Any, device: Any) -> Work | None:
    """Return the work of the current stream of a tensor's device.

    A copy to a tensor on the CPU may be in flight: then the current stream of the accelerator in use, if one is.
    """
    if device.type == "cpu":
        for name in _ACCELERATORS:
            if hasattr(torch, name) and getattr(torch, name).is_initialized():
                return _current(getattr(torch, name).current_stream())
        return Work("done")
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "current_stream"):
        return _current(module.current_stream(device))
    return by_methods(module)  # `torch.mps` has no streams


def _current(stream: Any) -> Work | None:
    return _torch(stream) or by_methods(stream)


def _cupy(x: Any) -> Work | None:
    cupy = sys.modules["cupy"]
    cuda = cupy.cuda
    here = cuda.runtime.getDevice()  # the current device, for objects that name none
    if isinstance(x, cupy.ndarray):
        here = x.device.id
        x = cuda.get_current_stream(here)
    if cuda.runtime.is_hip:  # as in `_torch`
        return by_methods(x)
    if isinstance(x, cuda.Event):
        return Work("event", x.ptr, here, x)
    if isinstance(x, (cuda.Stream, cuda.ExternalStream)):
        return Work("stream", x.ptr, here if x.device_id < 0 else x.device_id, x)  # -1: the current device
    return None


def _numba(x: Any) -> Work | None:
    cuda = sys.modules["numba.cuda"]
    here = cuda.get_current_device().id  # its streams and events name no device
    if cuda.is_cuda_array(x):
        x = x.stream or cuda.default_stream()
    if isinstance(x, cuda.cudadrv.driver.Event):
        return Work("event", int(getattr(x.handle, "value", x.handle)), here, x)  # a ctypes value, or an integer
    if isinstance(x, cuda.cudadrv.driver.Stream):
        return Work("stream", int(x), here, x)
    return None


def _cuda_core(x: Any) -> Work | None:
    core = sys.modules.get("cuda.core")
    return Work("event", int(x.handle), x.device.device_id, x) if core and isinstance(x, core.Event) else None


#: By the package of an object's class, or of a base class of it.
_READERS: Final[Mapping[str, Callable[[Any], Work | None]]] = {
    "torch": _torch,
    "cupy": _cupy,
    "numba": _numba,
    "numba_cuda": _numba,
    "cuda": _cuda_core,
}


def handle_of(thing: object) -> int:
    """Return a CUDA stream handle: the integer itself, or that of an object with ``__cuda_stream__``."""
    protocol = getattr(thing, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol  # older libraries have a property
        if not (isinstance(answer, tuple) and len(answer) == 2 and answer[0] == 0):
            raise InvalidTypeError(
                f"__cuda_stream__ of {thing!r} must be (0, handle), the supported version, not {answer!r}"
            )
        thing = answer[1]
    if isinstance(thing, bool) or not isinstance(thing, int):
        raise InvalidTypeError(
            f"a stream's handle is an integer, or an object with __cuda_stream__ has it, not {thing!r}; PyTorch's is "
            "torch_stream.cuda_stream, CuPy's cupy_stream.ptr"
        )
    return thing


def is_captured(driver: Driver, stream: int) -> bool:
    """Return whether a stream, as the driver names it, is being captured into a graph. Any thread may call it."""
    try:
        return driver.stream_capturing(stream)
    except BusyError as error:  # a default stream, while a stream that waits for it is captured: the same for callers
        if getattr(error, "code", 0) == STREAM_CAPTURE_IMPLICIT:
            return True
        raise
