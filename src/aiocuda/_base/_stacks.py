"""The stacks of other threads."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TypeVar, cast

from ._checks import has_gil

__all__ = ["formatted", "stack_of"]

T = TypeVar("T")


def stack_of(thread_id: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; none if it has ended, or without the GIL.

    On free-threaded Python the thread goes on meanwhile, and leaves frames that are being read: the process crashes.

    Reading `f_back` of a frame of another thread is not safe in Python 3.11: it makes an object, and that may begin a
    garbage collection. If this calls a function in Python, the other thread may go on and leave the frame, and the new
    object then refers to memory of something else.
    """
    innermost = _without_collections(sys._current_frames).get(thread_id) if has_gil() else None
    if innermost is None:
        return []
    outwards = itertools.accumulate(itertools.repeat("f_back"), getattr, initial=innermost)
    return _without_collections(functools.partial(list, itertools.takewhile(bool, outwards)))


def formatted(stack: list[FrameType]) -> str:
    """Return a stack as a traceback shows it, the innermost frame last."""
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(stack))
    return "".join(lines.format())


def _without_collections(function: Callable[[], T]) -> T:
    """Call a function that is written in C, while no garbage collection begins."""
    if sys.version_info >= (3, 12) or not gc.isenabled():  # since 3.12, no function in C begins a collection
        return function()
    # `map` lets no other thread run between these calls: none finds collections disabled.
    return cast(T, list(map(operator.call, (gc.disable, function, gc.enable)))[1])
