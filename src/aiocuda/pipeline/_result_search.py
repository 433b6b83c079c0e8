"""Searches results for arrays in certain memory, inside of objects of any class."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import types
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .._base._types import ProcessLocal
from ..errors import UnsupportedError
from ._slot_ranges import SlotRanges

__all__ = ["holder_of_array"]

#: The most objects that are searched, in all results together: 1 µs each.
MOST_SEARCHED: Final = 10_000

#: The least number of objects that are searched in each result, also if there are many results.
FEW_SEARCHED: Final = 16

#: Objects that are searched in one iteration of the loop.
AT_ONCE: Final = 256

#: Classes of objects that belong to the whole program, and lead to all of its other objects.
_NOT_SEARCHED: Final = (
    type, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, contextvars.Context,
    asyncio.AbstractEventLoop, asyncio.Future, ProcessLocal,
)  # fmt: skip


async def holder_of_array(results: Sequence[Any], ranges: SlotRanges, plain: frozenset[type]) -> Any:
    """Return the first result that holds an array in the memory, at any depth; None if none does.

    Objects are found as the garbage collector finds them. Classes, modules, globals, tasks and event loops are not
    searched: a result does not contain them.

    Parameters
    ----------
    plain
        Types of objects that hold no others.
    """
    limit = max(MOST_SEARCHED // max(1, len(results)), FEW_SEARCHED)
    seen: set[int] = set()
    kept: list[Any] = []  # what was seen, so that no other object gets its id
    for result in results:
        found = [result]
        searched = 0
        while found and searched < limit:
            later: list[Any] = []
            for value in found:
                kind = type(value)
                if kind in plain or id(value) in seen or issubclass(kind, _NOT_SEARCHED):
                    continue
                seen.add(id(value))
                kept.append(value)
                searched += 1
                if len(kept) % AT_ONCE == 0:
                    await asyncio.sleep(0)
                if _shares(value, ranges):
                    return result
                if searched >= limit:
                    break
                later += _referents(value)[:MOST_SEARCHED]
            found = later
    return None


def _shares(value: Any, ranges: SlotRanges) -> bool:
    try:
        return ranges.shares(value)
    except UnsupportedError:
        return True  # an array of another library, which lies there


def _referents(value: Any) -> Sequence[Any]:
    """Return the objects to which an object refers."""
    kind = type(value)
    if issubclass(kind, np.ndarray):  # the collector does not look into it
        return list(value.flat) if value.dtype.kind == "O" else ()
    found = gc.get_referents(value)
    if kind is types.FunctionType:
        return [each for each in found if each is not value.__globals__ and each is not value.__builtins__]
    return found
