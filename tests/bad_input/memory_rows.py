"""Rows 1 to 30 and 66 to 68: sizes, arrays, what other libraries hand over, and memory elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiocuda import (
    BusyError,
    ClosedError,
    DeviceOutOfMemory,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    UnsupportedError,
    WrongDeviceError,
)
from tests.bad_input.case import Case, World, each_of

_GRID = np.arange(12, dtype=np.float32).reshape(3, 4)
_ONES = np.ones(16, np.float32)


def _read_only() -> Any:
    array = np.ones(16, np.float32)
    array.flags.writeable = False
    return array


class _Interfaced:
    """A wrong answer for the device of a buffer."""

    def __init__(self, world: World, without: str = "", **entries: Any) -> None:
        buffer = world.buffer
        told = {"shape": buffer.shape, "typestr": "<f4", "data": (buffer.address, False), "version": 3, "stream": None}
        told |= entries
        told.pop(without, None)
        self.__cuda_array_interface__ = told


class _Elsewhere:
    """An object on a device of another kind."""

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("nobody should ask for it")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (10, 0)  # kDLROCM


def _used(world: World) -> Any:
    """A capsule that was adopted already."""
    capsule = world.buffer.__dlpack__(stream=-1)
    world.stream.adopt(capsule)
    return capsule


def _in_flight(world: World) -> Any:
    """An array that a copy is writing; earlier operations delay the copy."""
    target = np.empty(16, np.float32)
    operation = world.stream.download(world.buffer, target)
    return target, operation


async def _closed_stream(world: World) -> Any:
    stream = world.device.stream(name="gone")
    await stream.aclose()
    return stream


CASES = [
    *(
        Case(1, name, verb, InvalidArgumentError, "-1")
        for name, verb in {
            "empty": lambda world, _: world.stream.empty(-1),
            "pinned": lambda world, _: world.device.pinned(-1),
            "unified": lambda world, _: world.device.unified((2, -1)),
        }.items()
    ),
    *(
        Case(
            3,
            f"2**{round(math.log2(size))}",
            each_of(lambda world, size: world.stream.empty(size, "u1"), size),
            InvalidArgumentError,
            str(size),
        )
        for size in (2**63, 2**64, 10**30)
    ),
    *(
        Case(4, repr(size), each_of(lambda world, size: world.stream.empty(size), size), InvalidTypeError, repr(size))
        for size in (True, 3.0, "16", None, math.nan)
    ),
    Case(6, "2**60 complex128", lambda world, _: world.stream.empty(2**60, "c16"), InvalidArgumentError, f"{2**60}"),
    Case(
        7,
        "2**46 bytes",
        lambda world, _: world.stream.empty(2**46, "u1"),
        DeviceOutOfMemory,
        f"{2**46:,}",
        reaches=True,
    ),
    Case(8, "index -17", lambda world, _: world.buffer[-17], InvalidArgumentError, "-17"),
    Case(9, "index 16", lambda world, _: world.buffer[16], InvalidArgumentError, "16"),
    Case(9, "index 2**64", lambda world, _: world.buffer[2**64], InvalidArgumentError, str(2**64)),
    Case(9, "view of 17 items", lambda world, _: world.buffer.reshape(17), InvalidArgumentError, "17"),
    Case(10, "up", lambda world, _: world.stream.copy(world.buffer, _ONES[:5]), InvalidArgumentError, "20 bytes"),
    Case(10, "down", lambda world, _: world.stream.download(world.buffer, _ONES[:5]), InvalidArgumentError, "20 bytes"),
    Case(
        10,
        "within",
        lambda world, _: world.stream.copy(world.buffer[:3], world.buffer[4:8]),
        InvalidArgumentError,
        "12 bytes",
    ),
    Case(
        12,
        "overlap",
        lambda world, _: world.stream.copy(world.buffer[:9], world.buffer[7:]),
        InvalidArgumentError,
        "overlap",
    ),
    Case(13, "every second", lambda world, _: world.stream.upload(_ONES[::2]), InvalidArgumentError, "ascontiguous"),
    Case(13, "transposed", lambda world, _: world.stream.upload(_GRID.T), InvalidArgumentError, "ascontiguousarray"),
    Case(14, "reversed", lambda world, _: world.stream.upload(_ONES[::-1]), InvalidArgumentError, "(-4,)"),
    Case(
        15,
        "read-only array",
        lambda world, _: world.stream.download(world.buffer, _read_only()),
        InvalidArgumentError,
        "read-only",
    ),
    Case(16, "object", lambda world, _: world.stream.upload(np.array([None])), InvalidTypeError, "object"),
    Case(
        16,
        "structure with an object",
        lambda world, _: world.stream.empty(3, [("a", "i4"), ("b", "O")]),
        InvalidTypeError,
        "'b'",
    ),
    Case(
        17,
        "int32 into float32",
        lambda world, _: world.stream.copy(world.buffer, np.ones(16, np.int32)),
        InvalidTypeError,
        "int32",
    ),
    Case(18, "big-endian", lambda world, _: world.stream.upload(np.ones(3, ">f4")), InvalidTypeError, ">f4"),
    Case(
        22,
        "target of two copies",
        lambda world, given: world.stream.download(world.buffer, given[0]),
        BusyError,
        "is writing this",
        given=_in_flight,
    ),
    *(
        Case(
            23,
            type(target).__name__,
            each_of(lambda world, target: world.stream.copy(target, world.buffer), target),
            InvalidArgumentError,
            "read-only",
        )
        for target in (bytes(64), memoryview(bytes(64)))
    ),
    *(
        Case(
            row,
            name,
            each_of(lambda world, entries: world.stream.adopt(_Interfaced(world, **entries)), entries),
            InvalidArgumentError,
            says,
            reaches=row == 26,
        )
        for row, name, entries, says in (
            (24, "address 0", {"data": (0, False)}, "it has no memory"),
            (25, "version 99", {"version": 99}, "99"),
            (25, "no shape", {"without": "shape"}, "'shape'"),
            (25, "no typestr", {"without": "typestr"}, "'typestr'"),
            (25, "a list as shape", {"shape": [16]}, "[16]"),
            (25, "address of a wrong type", {"data": ("here", False)}, "'here'"),
            (25, "data of a wrong type", {"data": "here"}, "'here'"),
            (26, "strides outside", {"strides": (64,)}, "(64,)"),
            (26, "strides before it", {"strides": (-4,)}, "(-4,)"),
        )
    ),
    Case(
        27, "capsule used twice", lambda world, capsule: world.stream.adopt(capsule), StaleHandleError, "capsule", _used
    ),
    *(
        Case(
            row,
            f"free_all {name}",
            lambda world, thing: world.device.memory.free_all(thing),
            error,
            says,
            given,
            devices=devices,
        )
        for row, name, given, error, says, devices in (
            (30, "of another device", lambda world: world.distant, WrongDeviceError, "distant", 2),
            (37, "of a closed stream", lambda world: _closed_stream(world), ClosedError, "gone", 1),
            (39, "of a handle", lambda _: 4096, InvalidTypeError, "4096", 1),
            (39, "of a buffer", lambda world: world.buffer, InvalidTypeError, "DeviceBuffer", 1),
        )
    ),
    Case(28, "ROCm", lambda world, _: world.stream.adopt(_Elsewhere()), WrongDeviceError, "ROCm"),
    Case(28, "ROCm uploaded", lambda world, _: world.stream.upload(_Elsewhere()), WrongDeviceError, "ROCm"),
    *(
        Case(29, name, verb, WrongDeviceError, says, lambda world: world.distant.empty(4), devices=2)
        for name, says, verb in (
            ("fill", "device 1", lambda world, theirs: world.stream.fill(theirs, 1)),
            ("download", "device 1", lambda world, theirs: world.stream.download(theirs)),
            ("free", "left is a stream", lambda world, theirs: theirs.free(world.stream)),
        )
    ),
    Case(
        30,
        "event of another device",
        lambda world, event: world.stream.record(event=event),
        WrongDeviceError,
        "another device",
        lambda world: world.distant.record(),
        devices=2,
    ),
    Case(
        66,
        "device memory",
        lambda world, _: world.stream.prefetch(world.buffer),
        InvalidArgumentError,
        "device.unified",
    ),
    Case(
        66,
        "device 99",
        lambda world, _: world.stream.prefetch(world.managed, 99),
        InvalidArgumentError,
        "99",
        devices=2,  # the error names their number
    ),
    Case(66, "the moon", lambda world, _: world.stream.prefetch(world.managed, "moon"), InvalidArgumentError, "'moon'"),
    Case(
        66,
        "advice for the moon",
        lambda world, _: world.managed.advise("accessed_by", "moon"),
        InvalidArgumentError,
        "'moon'",
    ),
]

__all__ = ["CASES", "UnsupportedError"]
