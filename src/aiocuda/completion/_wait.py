"""`aiocuda.wait`: await any GPU work, without a device of the caller."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import Any, TypeAlias

from .._base._checks import check_timeout, has_gil, is_coroutine_function, is_function
from .._core import Operation, StreamOperation
from ..errors import BusyError, DriverNotAvailableError, InvalidTypeError, NoEventLoopError, UnsupportedError
from ._foreign_work import Work, by_methods, work_of
from ._waits import JoinedWait, PolledWait, ThreadWait, Wait, described

__all__ = ["wait"]

#: The waits that one call of `wait` has made, by device and CUDA's handle of the stream. During the call no other code
#: enqueues on a stream, so all waits for one stream can share one event.
Streams: TypeAlias = dict[tuple[int, int], Operation[None]]

#: Empty, then for the rest of the process: the CUDA driver, or the reason why the process cannot use CUDA.
_cuda: list[Any] = []


def wait(x: Any, *, timeout: float | None = None) -> Operation[None]:
    """Return an operation that is done when the work that is enqueued so far is done.

    It opens no device and creates no stream, so that a library can call it in an event loop of others. What it uses in
    the loop ends with the loop. An event is recorded before this function returns: later work is not waited for.

    Parameters
    ----------
    x
        One of these; it is held until the wait is done.

        - A stream, an event, a tensor or an array of PyTorch, CuPy, numba-cuda or cuda.core. A tensor or an array
          stands for the current stream of its device; a tensor on the CPU for the current stream of the current device,
          or for nothing if no GPU is used.
        - Any object with ``__cuda_stream__``.
        - An operation, an event, a stream or a buffer of aiocuda.
        - A function without arguments that returns True when the work is done. The loop calls it 50 µs later, then more
          and more rarely, at most 5 ms apart.
        - A list or a tuple of these: all are waited for, then the first failure is raised. Those of one stream share an
          event. Two calls do not: another library may have enqueued work in between.

        Where CUDA cannot be used, an object with ``query()`` is polled like a function, and one with ``synchronize()``
        only is waited for on a thread of its own, which a cancelled wait leaves until that call returns.
    timeout
        Seconds from now after which the wait raises `TimeoutError`.

    Raises
    ------
    InvalidTypeError
        ``x`` is none of these, or the function is a coroutine function.
    InvalidArgumentError
        The event was never recorded, or the timeout is negative or not a number.
    UnsupportedError
        The stream is being captured into a graph; or CUDA cannot be used, and ``x`` has no other method.
    WrongLoopError
        ``x`` belongs to another event loop.
    ClosedError
        ``x`` belongs to a device or a stream that was closed.
    NoEventLoopError
        No event loop is running.
    DeviceFault
        The device has faulted. Each task that waits gets it, too.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        raise NoEventLoopError("a wait belongs to the running event loop, and none is running: call it in a coroutine")
    limit = check_timeout(timeout)
    found = _operations_of(x, loop, {})
    # Only a wait that this call has made takes the limit itself. One that was passed keeps its own: it is joined.
    is_new = len(found) == 1 and isinstance(found[0], Wait) and not isinstance(x, (Wait, list, tuple))
    waiting: Wait = found[0] if is_new else JoinedWait(loop, x, found)
    if limit is not None:
        waiting.limit(limit)
    return waiting


def _operations_of(x: Any, loop: asyncio.AbstractEventLoop, streams: Streams) -> list[Any]:
    """Return the operations that ``x`` stands for. Functions and work of other libraries become waits by `_foreign`."""
    if isinstance(x, (list, tuple)):
        return [operation for each in x for operation in _operations_of(each, loop, streams)]
    own = getattr(type(x), "_awaited", None)
    if own is not None:  # an event, a stream or a buffer of aiocuda: its class returns the operations
        found: list[Any] = list(own(x))
    elif isinstance(x, Awaitable) and hasattr(x, "remove_done_callback") and hasattr(x, "wait"):
        found = [x]  # an operation, or a node, a ticket or a gathering
    else:
        return [_foreign(x, loop, streams)]
    for operation in found:
        owner = operation.queue if isinstance(operation, StreamOperation) else operation
        if hasattr(owner, "check_loop"):
            owner.check_loop()  # raises if it belongs to another loop
    return found


def _foreign(x: Any, loop: asyncio.AbstractEventLoop, streams: Streams) -> Operation[None]:
    """Return the wait for a function, or for an object of another library: by the CUDA driver if CUDA can be used."""
    work = work_of(x)
    if work is None and is_function(x) and not isinstance(x, type):  # calling a class is no poll
        work = Work("poll", function=x)
    if work is not None and work.kind in ("stream", "event"):
        driver = _driver()
        if not isinstance(driver, str):
            return _on_cuda(driver, work, x, loop, streams)
        work = by_methods(work.source)  # query() or synchronize() of the library's object
        if work is None:
            raise UnsupportedError(
                f"{described(x)} is work of CUDA without query() and synchronize(), and CUDA cannot be used: {driver}"
            )
    if work is None or is_coroutine_function(work.function):
        raise InvalidTypeError(
            f"wait takes a stream, an event, a tensor, an array, an operation or a function that returns a bool, not "
            f"{described(x)}{_cure(x)}"
        )
    if work.kind == "done" or work.function is None:  # "done" is the only kind left without a function
        done = Wait(loop, None)
        done.finish()
        return done
    return (PolledWait if work.kind == "poll" else ThreadWait)(loop, x, work.function)


def _cure(x: Any) -> str:
    if asyncio.iscoroutine(x) or asyncio.isfuture(x):
        return ": await it"
    return ": `await device.drain()` waits for all its work" if hasattr(type(x), "drain") else "; see aiocuda.wait"


def _on_cuda(driver: Any, work: Work, x: Any, loop: asyncio.AbstractEventLoop, streams: Streams) -> Operation[None]:
    """Return a wait for an event, or for the work so far of a stream, after which an event is recorded now.

    ``streams`` has the waits of this call of `wait`: one is enough for all objects of a stream.
    """
    from ._event_watch import EventWatch  # here, because only a process with CUDA needs it

    if work.kind == "event":
        device = work.device or 0  # CUDA queries an event, and makes a stream wait for it, on any device
        watch = EventWatch.of(driver, device, loop)
        return watch.after_event(driver.event_import(device, work.handle), work.handle, x)
    try:
        device = driver.stream_device(work.handle) if work.device is None else work.device
    except BusyError as error:
        raise _in_a_capture(error) from error
    key = device, work.handle
    if key not in streams:
        watch = EventWatch.of(driver, device, loop)
        try:
            streams[key] = watch.after_stream(work.handle, x)
        except BusyError as error:
            raise _in_a_capture(error) from error
    return streams[key]


def _in_a_capture(error: BusyError) -> UnsupportedError:
    """Return the error of a wait for a stream that is captured into a graph."""
    return UnsupportedError(f"{error}: the event of a wait would become part of the graph, or end the capture")


def _driver() -> Any:
    """Return the CUDA driver, or the reason why CUDA cannot be used. The first call looks for it."""
    if not _cuda:
        _cuda.append(_find())
    return _cuda[0]


def _find() -> Any:
    """Look for the CUDA driver: return it, or the reason why CUDA cannot be used."""
    if sys.platform in ("win32", "darwin"):
        return f"there are no notifiers on {sys.platform}"
    if not has_gil():
        return "CUDA on free-threaded Python is not tested: PYTHON_GIL=1 enables the GIL"
    from ..driver.cuda._driver import CudaDriver

    driver = CudaDriver.get()
    try:
        return driver if driver.device_count() else "the NVIDIA driver finds no GPU"
    except DriverNotAvailableError as error:
        return str(error)
