"""Await the work of PyTorch.

PyTorch's current stream, device, grad mode, inference mode and autocast belong to the thread, not to the task. A
``with torch.cuda.stream(…)`` block around an ``await`` therefore sends the kernels of other tasks to that stream. Here
they are set inside a function (`submit`), or for each step of a coroutine (`on`).

Without a GPU the same programs run with CPU tensors: `device_of` returns the device for them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from ..completion import Operation
from ..completion import wait as wait_for
from ..lowlevel import flushed, queue_of
from ..stream import Stream
from ._library import Library, require
from ._per_step import per_step

torch: Any = require("torch", "PyTorch", (2, 4), "torch")

from ._torch_calls import CallOnHost, CallOnStream, TorchStep  # noqa: E402 - after the check of the version
from ._torch_state import TorchStream  # noqa: E402

__all__ = ["device_of", "on", "replay", "submit", "wait"]

P = ParamSpec("P")
T = TypeVar("T")


_library = Library("PyTorch", TorchStream, CallOnStream, CallOnHost)


def device_of(stream: Stream) -> Any:
    """Return the `torch.device` for tensors of a stream: ``cuda:N``, or ``cpu`` if the stream's device is no GPU."""
    theirs = _library.streams.if_on_gpu(stream)
    return torch.device("cpu") if theirs is None else theirs.stream.device


def submit(stream: Stream, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
    """Call a function of PyTorch with this stream as PyTorch's current stream; the result is what it returns.

    It is `aiocuda.Stream.submit` with PyTorch's rules. The stream first waits, on the device, for the caller's current
    stream, on which the arguments were computed. The tensors of the result are recorded for the caller's stream, so
    that they can be used there and dropped. The grad mode, the inference mode and autocast are the caller's.

    Without a GPU the function runs on a thread, in the order of the stream.

    Parameters
    ----------
    stream
        A stream of aiocuda.
    function
        A plain function, or a module. Its result may be nested: dicts, lists, tuples and dataclasses of tensors.
    *args, **kwargs
        Its arguments. They are held until the device has finished.

    Raises
    ------
    InvalidTypeError
        ``function`` is a coroutine function, or not callable.
    BusyError
        PyTorch is capturing the caller's current stream into a graph.

    Notes
    -----
    A result that is used on a third stream needs ``tensor.record_stream(third)`` before it is dropped.
    """
    # The checks of a function look for attributes that a module does not have, which is slow.
    is_module = type(function).__call__ is torch.nn.Module.__call__
    return _library.submit(stream, function, args, kwargs, type(function).__qualname__ if is_module else "")


def wait(x: Any = None) -> Operation[None]:
    """Do the same as `aiocuda.wait`; without an argument, for the current stream of the current device."""
    return wait_for(torch.empty(0) if x is None else x)


def on(stream: Stream) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Return a decorator for coroutine functions that use PyTorch on this stream.

    Between two awaits, the coroutine has the stream as PyTorch's current stream, and the device, grad mode, inference
    mode and autocast as it last had them. At each await all of these are as they were before, so that other tasks do
    not see them. So ``with torch.no_grad():`` around an ``await`` concerns this coroutine only.

    The stream first waits, on the device, for the caller's current stream, on which the arguments were computed. The
    tensors of the result are recorded for the caller's stream. Await the work before you return them:
    ``await stream.synchronize()``.

    Parameters
    ----------
    stream
        A stream of aiocuda, of the event loop that runs the coroutine. While it has work on the host, the coroutine is
        not resumed. Between two awaits PyTorch comes before such work: await an upload before you use its buffer.

    Notes
    -----
    Other settings of PyTorch belong to the process, or to the thread: a default device that is set by a ``with`` block
    holds for other tasks, too.
    """
    theirs, queue = _library.streams.if_on_gpu(stream), queue_of(stream)
    return per_step(lambda: TorchStep(queue, theirs), before=lambda: flushed(queue))


def replay(stream: Stream, graph: Any) -> Operation[None]:
    """Replay a `torch.cuda.CUDAGraph` on a stream.

    Its inputs are copied to their tensors by a `submit` on the same stream before. Capture a graph when the program
    starts: a capture blocks the event loop.
    """
    return _library.replay(stream, graph, torch.cuda.CUDAGraph, "torch.cuda.CUDAGraph", "replay")
