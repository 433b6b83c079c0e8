"""Calls of a driver's functions in C, by `ctypes`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ...driver.protocol import NativeCall, RecordedCall, native_call

__all__ = ["by_ctypes", "forms"]

_FUNCTION = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)


def forms(call: RecordedCall) -> list[RecordedCall]:
    """Return a recorded call; and, if its driver has functions in C for it, a second call which makes those."""
    native = native_call(call)
    return [call] if native is None else [call, by_ctypes(native)]


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
