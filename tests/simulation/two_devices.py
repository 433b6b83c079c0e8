"""Actions of programs with two devices: copies between them, and uses of memory in a stream of the wrong device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiocuda.errors import ClosedError, DeviceFault, StaleHandleError, WrongDeviceError
from tests.simulation import internals
from tests.simulation.kernels import AFFINE

if TYPE_CHECKING:
    from aiocuda import Device
    from tests.simulation.actions import Actions

__all__ = ["copy_between_devices", "use_on_wrong_device"]


async def copy_between_devices(actions: Actions) -> None:
    """Copy a buffer to the other device, in a stream of either device."""
    target = actions.target()
    sources = [source for source in actions.same_shape(target) if source.device is not target.device]
    if sources:
        source = actions.choose(sources)
    else:
        source = actions.new_buffer(actions.stream(_other(actions, target.device)), target.buffer.shape[0])
    actions.copy_buffer(source, target, actions.stream(actions.choose([source, target]).device))
    actions.count("peer copy")


async def use_on_wrong_device(actions: Actions) -> None:
    """P27: use a buffer or an event in a stream of the other device, which is refused before any driver call."""
    checker = actions.checker
    target = actions.target()
    stream, home = actions.stream(_other(actions, target.device)), actions.stream(target.device)
    buffer, count = target.buffer, target.buffer.shape[0]
    calls: dict[str, Callable[[], Any]] = {
        "fill": lambda: stream.fill(buffer, 1),
        "upload": lambda: stream.copy(buffer, actions.values(count)),
        "download": lambda: stream.download(buffer),
        "launch": lambda: stream.launch(AFFINE, 1, 32, buffer, count, 1, 1),
        "copy": lambda: stream.copy(buffer[: count // 2], buffer[count // 2 : 2 * (count // 2)]),
        "free": lambda: buffer.free(stream),
        "record": lambda: stream.record(event=event),
    }
    name = actions.choose(list(calls))
    event = home.record() if name == "record" else None
    actions.count("mix-up")
    before = internals.call_count(checker.driver)
    try:
        calls[name]()
    except WrongDeviceError:
        # A launch is bound to its stream before its arguments are checked, and that asks nothing of the device.
        if internals.call_count(checker.driver) > before and name != "launch":
            checker.report(f"P27 {name} of {buffer!r} in {stream!r} was refused after the driver had been called")
    except (ClosedError, StaleHandleError, DeviceFault):
        return  # another task has closed the stream or freed the buffer, or the device is lost
    else:
        checker.report(f"P27 {name} of {buffer!r} was accepted by {stream!r}, a stream of another device")


def _other(actions: Actions, device: Device) -> Device:
    return actions.choose([each for each in actions.devices if each is not device])
