"""Adopt: another library's array as a buffer of ours, in the order of both sides' streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .._device_resources import resources_of
from ..completion._operation import Operation
from ..completion._stream_queue import StreamQueue
from ..errors import BusyError, InvalidArgumentError, InvalidTypeError, WrongDeviceError
from ..memory import _array_interface, _dlpack
from ..memory._arrays import check_awaited
from ..memory._buffer import DeviceBuffer
from ..memory._layout import check_contiguous, reach
from ..memory._pinned import PinnedBuffer
from ._imported import queue_of

if TYPE_CHECKING:
    from .._device import Device

__all__ = ["adopt"]

_LEGACY: Final = 1  # CU_STREAM_LEGACY, as DLPack calls it


def adopt(device: Device, queue: StreamQueue, thing: Any, read_only: bool) -> DeviceBuffer | PinnedBuffer:
    """`Stream.adopt`."""
    queue.check()
    check_awaited(thing, "what is to be adopted")
    if isinstance(thing, DeviceBuffer) and thing.device is not device:
        raise WrongDeviceError(
            f"{thing!r} is a buffer of another device already: bring it over by stream.copy(target, source)"
        )
    if _dlpack.is_capsule(thing):
        return _from_capsule(device, queue, thing, read_only, "the capsule", ordered=False)
    if hasattr(type(thing), "__dlpack__"):
        return _from_dlpack(device, queue, thing, read_only)
    interface = getattr(thing, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(device, queue, thing, _array_interface.read(interface), read_only)
    raise InvalidTypeError(
        f"{type(thing).__name__} has neither __dlpack__ nor __cuda_array_interface__: a host array goes by "
        "stream.upload(array)"
    )


def _from_dlpack(device: Device, queue: StreamQueue, thing: Any, read_only: bool) -> DeviceBuffer | PinnedBuffer:
    kind, index = (int(part) for part in thing.__dlpack_device__())
    what = f"this {type(thing).__name__}"
    _check_device(device, what, kind, index)
    if kind == _dlpack.CUDA_HOST:
        array = np.from_dlpack(thing)  # which holds the producer
        _check_writable(what, not array.flags.writeable, read_only)
        return resources_of(device).pinned_pool.borrow(array)[0]
    handle = device.driver.stream_handle(queue.handle)
    stream = handle or (_LEGACY if kind != _dlpack.EXTENSION else handle)
    try:
        capsule = thing.__dlpack__(stream=stream, max_version=_dlpack.VERSION)
    except TypeError:  # older than DLPack 1.0
        capsule = thing.__dlpack__(stream=stream)
    return _from_capsule(device, queue, capsule, read_only, what, ordered=True)


def _from_capsule(
    device: Device, queue: StreamQueue, capsule: object, read_only: bool, what: str, *, ordered: bool
) -> DeviceBuffer:
    """The producer, if it was asked to, has let this very stream come behind its own work."""
    tensor = _dlpack.read(capsule)
    _check_device(device, what, tensor.device_type, tensor.device_id)
    if tensor.device_type == _dlpack.CUDA_HOST:
        raise InvalidTypeError(f"{what} has pinned memory: pass the array that it was made from")
    if tensor.device_type == _dlpack.EXTENSION and not device.memory.exports.owns(tensor.address):
        raise WrongDeviceError(
            f"{what} is on an extension device that is not {device!r}: only what was handed out there comes back"
        )
    _check_layout(what, tensor.shape, tensor.strides, tensor.dtype)
    _check_writable(what, tensor.read_only, read_only)
    producer = _dlpack.take(capsule)
    allocation_event = queue.submit_marker() if ordered else None
    return device.memory.foreign.adopt(producer, tensor.address, tensor.shape, tensor.dtype, allocation_event, queue)


def _from_interface(
    device: Device, queue: StreamQueue, thing: object, told: _array_interface.Interface, read_only: bool
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
    allocation_event = None if told.stream is None else _behind(device, told.stream)
    return device.memory.foreign.adopt(thing, told.address, told.shape, told.dtype, allocation_event, None)


def _behind(device: Device, handle: int) -> Operation[Any]:
    """An event behind all that the producer's stream was given. Each stream of ours waits for it at its first use."""
    queue = queue_of(device, handle)
    if queue.shared and queue.is_captured():
        raise BusyError(f"{queue.name}, the producer's stream, is being captured: end that first")
    return queue.submit_marker()


def _check_device(device: Device, what: str, kind: int, index: int) -> None:
    cuda = device.memory.exports.is_cuda
    if kind == _dlpack.CPU:
        raise WrongDeviceError(
            f"{what} is in {_dlpack.device_name(kind)}: bring it to the device by `await stream.upload(x)`"
        )
    if kind == _dlpack.CUDA_HOST:
        return  # every device's
    if kind not in ((_dlpack.CUDA, _dlpack.CUDA_MANAGED) if cuda else (_dlpack.EXTENSION,)):
        raise WrongDeviceError(f"{what} is on {_dlpack.device_name(kind)}, the stream on {device!r}")
    if index != device.index and kind != _dlpack.CUDA_MANAGED:
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
