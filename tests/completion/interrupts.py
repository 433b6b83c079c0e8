"""Raise `KeyboardInterrupt` at every place where Ctrl-C can take effect.

Python runs signal handlers between two instructions: at the beginning of a function, after a call, and at a backward
jump. `sweep` raises an interrupt at each of these places in turn, in the modules that a test names.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, Self

from aiocuda._core import _bound_call, _queued_operation, _ring
from aiocuda.completion import (
    _extra,
    _gates,
    _host_queue,
    _interruption,
    _reports,
    _stream_operation,
    _stream_queue,
)

__all__ = ["QUEUE", "Interrupt", "sweep"]

#: The modules of the queue of a stream and of its operations.
QUEUE = (
    _bound_call, _extra, _gates, _host_queue, _interruption, _queued_operation, _reports, _ring, _stream_operation,
    _stream_queue,
)  # fmt: skip

PLACES = ("RESUME", "CALL")


@functools.cache
def places(code: CodeType) -> frozenset[int]:
    """Return the offsets in ``code`` at which an interrupt can come, and a few more."""
    found, former = set(), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "CACHE":
            continue
        if former.startswith(PLACES):
            found.add(instruction.offset)
        former = instruction.opname
        if "JUMP_BACKWARD" in former:
            found.add(instruction.argval)
    return frozenset(found)


class Interrupt:
    """A context that raises `KeyboardInterrupt` at the ``at``-th place that the code in ``modules`` reaches."""

    def __init__(self, at: int, *modules: ModuleType) -> None:
        self._left = at
        self._files = frozenset(str(module.__file__) for module in modules)
        self.where: str | None = None

    def __enter__(self) -> Self:
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # garbage of earlier tests would be finalised here; an interrupt in a finaliser is lost
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._stepped


def sweep(*modules: ModuleType, least: int) -> Iterator[Interrupt]:
    """Yield one `Interrupt` for each place until there are no more. Fail if there are fewer than ``least``."""
    for at in itertools.count(1):
        interrupt = Interrupt(at, *modules)
        yield interrupt
        if interrupt.where is None:
            assert at > least, "the places were not found"
            return
