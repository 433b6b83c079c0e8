"""Await the work of cuda.core, NVIDIA's Python interface to CUDA.

cuda.core has no current stream: `cuda.core.launch` and the methods of buffers name theirs. So a submitted function gets
cuda.core's object for the stream as its first argument.

cuda.core has no work without a GPU: on other drivers these functions raise `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..completion import Operation
from ..completion import wait as wait_for
from ..stream import Stream
from ._library import Call, Library, require

core: Any = require("cuda.core", "cuda.core", (1, 0), "cuda-core")

__all__ = ["device_of", "replay", "submit", "wait"]

P = ParamSpec("P")
T = TypeVar("T")

_library = Library("cuda.core", lambda handle, index: core.Stream.from_handle(handle), Call)


def device_of(stream: Stream) -> Any:
    """Return the `cuda.core.Device` of a stream."""
    _library.streams.of(stream)
    return core.Device(stream.device.index)


def submit(
    stream: Stream, function: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
) -> Operation[T]:
    """Call ``function(core_stream, *args, **kwargs)``, which enqueues work; the result is what it returns.

    It is `aiocuda.Stream.submit`, with cuda.core's object for the stream as the first argument.

    Parameters
    ----------
    stream
        A stream of aiocuda.
    function
        A plain function. It launches on devices that are current: call ``cuda.core.Device(index).set_current()`` once
        in the thread. Work that it enqueues on other streams is not waited for.
    *args, **kwargs
        Its arguments. They are held until the device has finished.

    Raises
    ------
    InvalidTypeError
        ``function`` is a coroutine function, or not callable.
    UnsupportedError
        The stream's device is no GPU.
    """
    return _library.submit(stream, function, args, kwargs)


def wait(x: Any) -> Operation[None]:
    """Do the same as `aiocuda.wait`."""
    return wait_for(x)


def replay(stream: Stream, graph: Any) -> Operation[None]:
    """Launch a `cuda.core.graph.Graph` on a stream."""
    return _library.replay(stream, graph, core.graph.Graph, "cuda.core.graph.Graph")
