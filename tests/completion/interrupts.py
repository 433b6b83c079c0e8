"""Ctrl-C wherever it can come.

A signal's handler runs between two instructions: where a function begins, behind a call, where a loop turns. An
interrupt is raised at each of these places in turn, in the modules that a test names.
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

__all__ = ["Interrupt", "sweep"]

PLACES = ("RESUME", "CALL")


@functools.cache
def places(code: CodeType) -> frozenset[int]:
    """Where in a function an interrupt can come, and some places more."""
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
    """Ctrl-C at the so-manieth of these places that the block comes by."""

    def __init__(self, at: int, *modules: ModuleType) -> None:
        self._left = at
        self._files = frozenset(str(module.__file__) for module in modules)
        self.where: str | None = None

    def __enter__(self) -> Self:
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()  # what earlier tests have left would end in here, and Ctrl-C in its finalisers is nobody's
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
    """One at each place, until there are no more; there are at least so many."""
    for at in itertools.count(1):
        interrupt = Interrupt(at, *modules)
        yield interrupt
        if interrupt.where is None:
            assert at > least, "the places were not found"
            return
