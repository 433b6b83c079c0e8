"""Await the work of CuPy.

CuPy's current stream belongs to the thread, not to the task: a ``with stream:`` block around an ``await`` sends the
kernels of other tasks to that stream. Here it is set inside a function (`submit`), or for each step of a coroutine
(`on`).

CuPy has no work without a GPU: on other drivers these functions raise `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Self, TypeVar

from ..completion import Operation
from ..completion import wait as wait_for
from ..errors import BusyError
from ..lowlevel import Queue, end_step, flushed, queue_of
from ..stream import Stream
from ._library import Call, Library, require
from ._per_step import per_step

cupy: Any = require("cupy", "CuPy", (13, 0), "cupy-cuda13x")

__all__ = ["device_of", "on", "replay", "submit", "wait"]

P = ParamSpec("P")
T = TypeVar("T")


def device_of(stream: Stream) -> Any:
    """Return the `cupy.cuda.Device` of a stream."""
    _library.streams.of(stream)
    return cupy.cuda.Device(stream.device.index)


def submit(stream: Stream, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
    """Call a function of CuPy with this stream as CuPy's current stream; the result is what it returns.

    It is `aiocuda.Stream.submit` with CuPy's rules. The stream first waits, on the device, for the stream that was
    current at the call of ``submit``, on which the arguments were computed.

    Parameters
    ----------
    stream
        A stream of aiocuda.
    function
        A plain function.
    *args, **kwargs
        Its arguments. They are held until the device has finished.

    Raises
    ------
    InvalidTypeError
        ``function`` is a coroutine function, or not callable.
    BusyError
        CuPy is capturing the caller's current stream into a graph.
    UnsupportedError
        The stream's device is no GPU.

    Notes
    -----
    CuPy's memory pool reuses the memory of a dropped array in the order of the stream on which it was made: for a
    result that is this stream. So use results on the stream that is current at later calls of ``submit``, or await the
    work that uses them before you drop them.
    """
    return _library.submit(stream, function, args, kwargs)


def wait(x: Any = None) -> Operation[None]:
    """Do the same as `aiocuda.wait`; without an argument, for the current stream of the current device."""
    return wait_for(cupy.cuda.get_current_stream() if x is None else x)


def on(stream: Stream) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Return a decorator for coroutine functions that use CuPy on this stream.

    Between two awaits, the coroutine has the stream as CuPy's current stream, and its device as the current device. At
    each await both are as they were before. The stream first waits, on the device, for the caller's current stream.

    Parameters
    ----------
    stream
        A stream of aiocuda, of the event loop that runs the coroutine. While it has work on the host, the coroutine is
        not resumed. Between two awaits CuPy comes before such work: await an upload before you use its buffer.

    Notes
    -----
    CuPy keeps one stack of ``with stream:`` blocks for the thread. So such a block in the coroutine must contain no
    await: the await raises `BusyError`.
    """
    ours, queue = _library.streams.of(stream), queue_of(stream)
    return per_step(lambda: _Step(queue, ours, stream.device.index), before=lambda: flushed(queue))


def replay(stream: Stream, graph: Any) -> Operation[None]:
    """Launch a `cupy.cuda.Graph` on a stream."""
    return _library.replay(stream, graph, cupy.cuda.Graph, "cupy.cuda.Graph")


class _CudaStream:
    """An object with ``__cuda_stream__``, for libraries that take a stream by CUDA's stream protocol.

    A `Stream` has that method, too, and refuses it while it has work on the host. A submitted function is called when
    that work is on the device.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def _make_stream(handle: int, index: int) -> Any:
    with cupy.cuda.Device(index):
        if hasattr(cupy.cuda.Stream, "from_external"):  # from version 14 on
            return cupy.cuda.Stream.from_external(_CudaStream(handle))
        return cupy.cuda.ExternalStream(handle, index)


class _CallOnStream(Call[Any]):
    """One call of a function, with CuPy's current stream and device set, after the work of the caller's stream."""

    __slots__ = ("_caller", "_index")

    def __init__(self, function: Callable[..., Any], theirs: Any, index: int) -> None:
        super().__init__(function, theirs, index)
        caller = cupy.cuda.get_current_stream(index)
        self._index = index
        self._caller = None if caller.ptr == theirs.ptr else caller
        self._refuse_captured()

    def _refuse_captured(self) -> None:
        if self._caller is not None and self._caller.is_capturing():
            raise BusyError(
                "CuPy's current stream is being captured into a graph, and a wait for it would become part of that "
                "graph: end the capture first"
            )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with cupy.cuda.Device(self._index), self._theirs:
            if self._caller is not None:
                self._refuse_captured()
                # An event of now, not of the call: its work may use memory of this stream that is free again.
                self._theirs.wait_event(self._caller.record())
            return self._function(*args, **kwargs)


class _Step:
    """CuPy's current stream and device during the steps of one coroutine. See `on`."""

    def __init__(self, queue: Queue, ours: Any, index: int) -> None:
        queue.check()
        self._queue = queue
        self._ours = ours
        self._device = index
        self._first = True

    def __enter__(self) -> Self:
        runtime = cupy.cuda.runtime
        self._outer_device = runtime.getDevice()
        runtime.setDevice(self._device)
        if self._first:
            self._first = False
            outer = cupy.cuda.get_current_stream()
            if outer.ptr != self._ours.ptr:
                self._ours.wait_event(outer.record())
        self._ours.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        cupy.cuda.runtime.setDevice(self._device)
        left_in = cupy.cuda.get_current_stream()
        self._ours.__exit__(*exc)
        cupy.cuda.runtime.setDevice(self._outer_device)
        end_step(self._queue)
        if left_in.ptr != self._ours.ptr:
            raise BusyError(
                f"a `with` block of {left_in!r} contains an await, and CuPy would restore the stream of another task "
                "at its end: enqueue on that stream between two awaits"
            )


_library = Library("CuPy", _make_stream, _CallOnStream)
