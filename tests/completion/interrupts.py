"""Raise `KeyboardInterrupt` at every place where Ctrl-C can take effect.

Python runs signal handlers between two instructions: at the beginning of a function, after a `yield`, after a call, and
at a backward jump. `sweep` raises an interrupt at each of these places in turn, in the modules that a test names.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, Self

from aiocuda._core import _bound_call, _ring, _state, _stream_operation
from aiocuda.completion import _host_queue, _interruption, _listeners, _stream_queue

__all__ = ["QUEUE", "Interrupt", "sweep"]

#: The modules of the queue of a stream and of its operations.
QUEUE = (
    _bound_call, _host_queue, _interruption, _listeners, _ring, _state, _stream_operation, _stream_queue,
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
        if "JUMP_BACKWARD" in former:  # until Python 3.12, handlers run after the jump; then before it
            found.add(instruction.argval if sys.version_info < (3, 13) else instruction.offset)
    return frozenset(found)


if sys.version_info < (3, 12):

    @contextlib.contextmanager
    def stepping(files: frozenset[str], step: Callable[[FrameType], None]) -> Iterator[None]:
        """Call ``step`` before each instruction of the functions of ``files`` that this thread enters or resumes."""

        def entered(frame: FrameType, event: str, arg: object) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return stepped

        def stepped(frame: FrameType, event: str, arg: object) -> Any:
            if event == "opcode":
                step(frame)
            return stepped

        before = sys.gettrace()
        sys.settrace(entered)
        try:
            yield
        finally:
            sys.settrace(before)

else:
    TOOL = 3  # of the six tools that `sys.monitoring` has, one without a purpose of its own

    @contextlib.contextmanager
    def stepping(files: frozenset[str], step: Callable[[FrameType], None]) -> Iterator[None]:
        """Call ``step`` before each instruction of the functions of ``files`` that this thread enters or resumes.

        `sys.settrace` has no events for the instructions of a function's first call.
        """
        monitoring, events = sys.monitoring, sys.monitoring.events
        thread, seen = threading.get_ident(), dict[int, CodeType]()

        def entered(code: CodeType, *_: object) -> None:
            if code.co_filename in files and id(code) not in seen:
                seen[id(code)] = code
                monitoring.set_local_events(TOOL, code, events.INSTRUCTION)

        def stepped(code: CodeType, offset: int) -> None:
            if threading.get_ident() == thread:  # the events of all threads come here
                step(sys._getframe(1))

        entries = events.PY_START, events.PY_RESUME, events.PY_THROW
        monitoring.use_tool_id(TOOL, __name__)
        for event in entries:
            monitoring.register_callback(TOOL, event, entered)
        monitoring.register_callback(TOOL, events.INSTRUCTION, stepped)
        monitoring.set_events(TOOL, sum(entries))
        try:
            yield
        finally:
            monitoring.set_events(TOOL, events.NO_EVENTS)
            for code in seen.values():
                monitoring.set_local_events(TOOL, code, events.NO_EVENTS)
            for event in (*entries, events.INSTRUCTION):
                monitoring.register_callback(TOOL, event, None)
            monitoring.free_tool_id(TOOL)


class Interrupt:
    """A context that raises `KeyboardInterrupt` at the ``at``-th place that the code in ``modules`` reaches."""

    def __init__(self, at: int, *modules: ModuleType) -> None:
        self._left = at
        self._stepping = stepping(frozenset(str(module.__file__) for module in modules), self._step)
        self.where: str | None = None

    def __enter__(self) -> Self:
        self._collects = gc.isenabled()
        gc.disable()  # garbage of earlier tests would be finalised here; an interrupt in a finaliser is lost
        self._stepping.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stepping.__exit__(None, None, None)
        if self._collects:
            gc.enable()

    def _step(self, frame: FrameType) -> None:
        if frame.f_lasti in places(frame.f_code):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise KeyboardInterrupt


def sweep(*modules: ModuleType, least: int) -> Iterator[Interrupt]:
    """Yield one `Interrupt` for each place until there are no more. Fail if there are fewer than ``least``."""
    for at in itertools.count(1):
        interrupt = Interrupt(at, *modules)
        yield interrupt
        if interrupt.where is None:
            assert at > least, "the places were not found"
            return
