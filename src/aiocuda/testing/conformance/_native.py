"""Calls of a driver's functions in C, by `ctypes`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ...driver.protocol import Driver, NativeCall, RecordedCall, native_call

__all__ = ["by_ctypes", "forms", "waits"]

_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)


def forms(call: RecordedCall) -> list[RecordedCall]:
    """Return a recorded call; and, if its driver has functions in C for it, a second call which makes those."""
    native = native_call(call)
    return [call] if native is None else [call, by_ctypes(native)]


def waits(driver: Driver, stream: int) -> list[Callable[[int], None]]:
    """Return functions that make a stream wait for an event: by the driver, and by its functions in C, if any."""
    native = native_call(driver.recorder(stream))

    def by_driver(event: int) -> None:
        driver.stream_wait(stream, event)

    if native is None:
        return [by_driver]

    def in_c(event: int) -> None:
        assert not any(map(_word, native.closed)), "the functions must not be called now"
        code = _FUNCTION(native.wait)(native.stream, native.event(event), 0, 0)
        if code:
            native.refuse("cuStreamWaitEvent", code)

    return [by_driver, in_c]


def by_ctypes(native: NativeCall) -> RecordedCall:
    """Return a call that does what `NativeCall` tells a compiled caller to do."""

    def call(values: Sequence[Any], event: int) -> None:
        assert not any(map(_word, native.closed)), "the functions must not be called now"
        recorded = native.event(event)
        native.pack(*values)
        if native.work:
            code = _FUNCTION(native.work)(*(ctypes.c_uint64 * 4).from_address(native.block))
            if code:
                native.refuse(native.name, code)
        code = _FUNCTION(native.record)(recorded, native.stream, 0, 0)
        if code:
            native.refuse("cuEventRecord", code)

    return call


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value
