"""Adopt: another library's array as a buffer of ours, in the order of both sides' streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..completion.lane import Lane
from ..completion.operation import Operation
from ..completion.shared import captured
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, WrongDeviceError
from ..memory import array_interface, dlpack
from ..memory.arrays import check_awaited
from ..memory.buffer import DeviceBuffer
from ..memory.layout import check_contiguous, reach
from ..memory.pinned import PinnedBuffer
from .imported import lane_of

if TYPE_CHECKING:
    from ..device import Device

__all__ = ["adopt"]

_LEGACY: Final = 1  # CU_STREAM_LEGACY, as DLPack calls it


def adopt(device: Device, lane: Lane, thing: Any, read_only: bool) -> DeviceBuffer | PinnedBuffer:
    """`Stream.adopt`."""
    lane.check()
    check_awaited(thing, "what is to be adopted")
    if isinstance(thing, DeviceBuffer) and thing.device is not device:
        raise WrongDeviceError(
            f"{thing!r} is a buffer of another device already: bring it over by stream.copy(target, source)"
        )
    if dlpack.is_capsule(thing):
        return _from_capsule(device, lane, thing, read_only, "the capsule", ordered=False)
    if hasattr(type(thing), "__dlpack__"):
        return _from_dlpack(device, lane, thing, read_only)
    interface = getattr(thing, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(device, lane, thing, array_interface.read(interface), read_only)
    raise InvalidTypeError(
        f"{type(thing).__name__} has neither __dlpack__ nor __cuda_array_interface__: a host array goes by "
        "stream.upload(array)"
    )


def _from_dlpack(device: Device, lane: Lane, thing: Any, read_only: bool) -> DeviceBuffer | PinnedBuffer:
    kind, index = (int(part) for part in thing.__dlpack_device__())
    what = f"this {type(thing).__name__}"
    _check_device(device, what, kind, index)
    if kind == dlpack.CUDA_HOST:
        array = np.from_dlpack(thing)  # which holds the producer
        _check_writable(what, not array.flags.writeable, read_only)
        return device._pinned.borrow(array)[0]
    handle = device.driver.stream_handle(lane.handle)
    stream = handle or (_LEGACY if kind != dlpack.EXTENSION else handle)
    try:
        capsule = thing.__dlpack__(stream=stream, max_version=dlpack.VERSION)
    except TypeError:  # older than DLPack 1.0
        capsule = thing.__dlpack__(stream=stream)
    return _from_capsule(device, lane, capsule, read_only, what, ordered=True)


def _from_capsule(
    device: Device, lane: Lane, capsule: object, read_only: bool, what: str, *, ordered: bool
) -> DeviceBuffer:
    """The producer, if it was asked to, has let this very stream come behind its own work."""
    tensor = dlpack.read(capsule)
    _check_device(device, what, tensor.device_type, tensor.device_id)
    if tensor.device_type == dlpack.CUDA_HOST:
        raise InvalidTypeError(f"{what} has pinned memory: pass the array that it was made from")
    if tensor.device_type == dlpack.EXTENSION and not device.memory.exports.owns(tensor.address):
        raise WrongDeviceError(
            f"{what} is on an extension device that is not {device!r}: only what was handed out there comes back"
        )
    _check_layout(what, tensor.shape, tensor.strides, tensor.dtype)
    _check_writable(what, tensor.read_only, read_only)
    producer = dlpack.take(capsule)
    born = lane.mark() if ordered else None
    return device.memory.foreign.adopt(producer, tensor.address, tensor.shape, tensor.dtype, born, lane)


def _from_interface(
    device: Device, lane: Lane, thing: object, told: array_interface.Interface, read_only: bool
) -> DeviceBuffer:
    """The dictionary names no device, so the driver is asked whose memory it is; and how much there is of it."""
    what = f"this {type(thing).__name__}"
    _check_writable(what, told.read_only, read_only)
    low, high = reach(told.shape, told.strides or _c_strides(told.shape, told.dtype.itemsize), told.dtype.itemsize)
    if high > low:
        found = device.driver.locate(told.address)
        if found is None:
            raise InvalidArgumentError(
                f"{what} says that it is at {told.address:#x}, where there is no memory of a device",
                address=told.address,
            )
        if found.device not in (-1, device.index):
            raise _other_device(what, found.device, device)
        begin = told.address - found.address
        if begin + low < 0 or begin + high > found.nbytes:
            raise InvalidArgumentError(
                f"{what} of shape {told.shape} and strides {told.strides} reaches from byte {begin + low} to "
                f"{begin + high} of an allocation of {found.nbytes}"
            )
    _check_layout(what, told.shape, told.strides, told.dtype)
    born = None if told.stream is None else _behind(device, told.stream)
    return device.memory.foreign.adopt(thing, told.address, told.shape, told.dtype, born, None)


def _behind(device: Device, handle: int) -> Operation[Any]:
    """An event behind all that the producer's stream was given. Each stream of ours waits for it at its first use."""
    lane = lane_of(device, handle)
    if lane.shared and captured(lane):
        raise BusyError(f"{lane.name}, the producer's stream, is being captured: end that first")
    return lane.mark()


def _check_device(device: Device, what: str, kind: int, index: int) -> None:
    cuda = device.memory.exports.is_cuda
    if kind == dlpack.CPU:
        raise WrongDeviceError(
            f"{what} is in {dlpack.device_name(kind)}: bring it to the device by `await stream.upload(x)`"
        )
    if kind == dlpack.CUDA_HOST:
        return  # every device's
    if kind not in ((dlpack.CUDA, dlpack.CUDA_MANAGED) if cuda else (dlpack.EXTENSION,)):
        raise WrongDeviceError(f"{what} is on {dlpack.device_name(kind)}, the stream on {device!r}")
    if index != device.index and kind != dlpack.CUDA_MANAGED:
        raise _other_device(what, index, device)


def _other_device(what: str, index: int, device: Device) -> WrongDeviceError:
    return WrongDeviceError(
        f"{what} is on device {index}, the stream on device {device.index}: adopt it on a stream of device {index}, "
        "then bring it over by stream.copy(target, source)",
        device=index,
        expected=device.index,
    )


def _check_layout(what: str, shape: Sequence[int], strides: Sequence[int] | None, dtype: np.dtype[Any]) -> None:
    if strides is not None:
        check_contiguous(what, shape, strides, dtype.itemsize)


def _check_writable(what: str, is_read_only: bool, read_only: bool) -> None:
    if is_read_only and not read_only:
        raise InvalidArgumentError(
            f"{what} is read-only, and a buffer may be written: if nothing here writes it, say so by "
            "stream.adopt(x, read_only=True); else copy it first"
        )


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))
