"""What a random program does with two devices: copies from one to the other, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import ClosedError, DeviceFault, StaleHandleError, WrongDeviceError
from ...kernels import Kernel
from .check import Checker

if TYPE_CHECKING:
    from ..._device import Device
    from .actions import Actions

__all__ = ["copy_between", "mix_up"]


async def copy_between(actions: Actions) -> None:
    """From one device to another, in a stream of either."""
    target = actions._target()
    sources = [source for source in actions._like(target) if source.device is not target.device]
    if sources:
        source = actions._one(sources)
    else:
        source = actions._new_buffer(actions._stream(_other(actions, target.device)), target.buffer.shape[0])
    actions._bring(source, target, actions._stream(actions._one([source, target]).device))
    actions.count("peer copy")


async def mix_up(actions: Actions, checker: Checker, kernel: Kernel) -> None:
    """A stream is given what is another device's: that is refused before the driver hears of it."""
    target = actions._target()
    stream, home = actions._stream(_other(actions, target.device)), actions._stream(target.device)
    buffer, count = target.buffer, target.buffer.shape[0]
    ways: dict[str, Callable[[], Any]] = {
        "fill": lambda: stream.fill(buffer, 1),
        "upload": lambda: stream.copy(buffer, actions._values(count)),
        "download": lambda: stream.download(buffer),
        "launch": lambda: stream.launch(kernel, 1, 32, buffer, count, 1, 1),
        "copy": lambda: stream.copy(buffer[: count // 2], buffer[count // 2 : 2 * (count // 2)]),
        "free": lambda: buffer.free(stream),
        "record": lambda: stream.record(event=event),
    }
    what = actions._one(list(ways))
    event = home.record() if what == "record" else None
    actions.count("mix-up")
    calls = checker.driver._calls
    try:
        ways[what]()
    except WrongDeviceError:
        # A launch is bound to its stream before its arguments are looked at, which asks nothing of the device.
        if checker.driver._calls > calls and what != "launch":
            checker.found(f"P27 {what} of {buffer!r} in {stream!r} was refused after the driver had been called")
    except (ClosedError, StaleHandleError, DeviceFault):
        return  # it has ended meanwhile
    else:
        checker.found(f"P27 {what} of {buffer!r} was taken by {stream!r}, a stream of another device")


def _other(actions: Actions, device: Device) -> Device:
    other: Device = actions._one([each for each in actions._devices if each is not device])
    return other
