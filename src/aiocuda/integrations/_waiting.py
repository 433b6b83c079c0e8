"""Waits for streams and events of other libraries, on the device that the running loop has open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..completion import Operation
from ..errors import InvalidArgumentError, NoEventLoopError
from ..lowlevel import OPEN_DEVICES, DeviceResources, enqueue_shared_mark, queue_of
from ..stream import Stream

__all__ = ["open_device_for", "wait_for_event", "wait_for_host", "wait_for_stream"]


def open_device_for(gpu: int | None) -> DeviceResources:
    """Return the device that the running loop has open for a GPU; for None, any device.

    Raises
    ------
    InvalidArgumentError
        The loop has none.
    NoEventLoopError
        No loop is running.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        raise NoEventLoopError("a wait belongs to the running event loop, and none is running: call it in a coroutine")
    found = OPEN_DEVICES.find(loop, gpu)
    if found is not None:
        return found
    which, index = ("", "") if gpu is None else (f" for GPU {gpu}", str(gpu))
    raise InvalidArgumentError(
        f"this event loop has no device open{which}: `async with aiocuda.open_device({index})` around the wait",
        index=gpu,
    )


def wait_for_stream(gpu: int, handle: int, keep: object) -> Operation[None]:
    """Return an operation that is done when the device has finished everything on a stream so far.

    Parameters
    ----------
    handle
        CUDA's handle of the stream, of aiocuda or of another library.
    keep
        An object that is held until then.
    """
    resources = open_device_for(gpu)
    resources.loop_state()  # raises if the device is being closed, or has failed
    return enqueue_shared_mark(resources.imports.queue_of(handle), keep)


def wait_for_host(keep: object) -> Operation[None]:
    """Return an operation for work of a library that has not used a GPU: that work is done when its call returns."""
    resources = open_device_for(None)
    known = resources.loop_state().waiting_streams
    stream = next((stream for stream in known if not stream.closed), None) or _waiting_stream(resources)
    return enqueue_shared_mark(queue_of(stream), keep)


def wait_for_event(gpu: int, make_wait: Callable[[Stream], object], keep: object) -> Operation[None]:
    """Return an operation that is done when the device has reached an event.

    Parameters
    ----------
    make_wait
        Makes a stream wait for the event, on the device.
    """
    stream = _waiting_stream(open_device_for(gpu))
    make_wait(stream)
    return enqueue_shared_mark(queue_of(stream), keep)


def _waiting_stream(resources: DeviceResources) -> Stream:
    """Return an idle stream of the running loop: an event that comes late must delay no other wait."""
    streams = resources.loop_state().waiting_streams
    for stream in streams:
        if stream.tail is None and not stream.closed:
            found: Stream = stream
            return found
    opened: Stream = resources.device.stream(name=f"waits-{len(streams)}")
    streams.append(opened)
    return opened
