"""Notes for errors of Python about uses of objects of aiocuda."""

from __future__ import annotations

import re

from ._user_code import add_note

__all__ = ["explain"]

#: How Python refuses a use of an object, and what to do in its place.
_MISUSED = {
    r"(?:object |')(Device|DeviceBuffer|Stream|UnifiedBuffer)(?: can't be used in 'await'|' object can't be awaited)":
    "it can be used at once: leave the `await` out. Operations are awaited",
    r"'async_generator' object (?:is not iterable|can't be awaited)|object async_generator can't be used in 'await'":
    "`async for` iterates over it, as over aiocuda.as_completed(operations)",
    r"'\S*Operation' object does not support the asynchronous": "an operation is awaited: `await operation`",
}  # fmt: skip


def explain(error: BaseException | None) -> None:
    """Add a note with the cure to a TypeError that Python itself raises.

    For these uses, the objects cannot raise an error of their own: with a method ``__await__``, a buffer would be
    awaitable for `inspect.isawaitable`, which libraries ask about the results of functions.
    """
    for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        explain(each)
    if type(error) is TypeError:
        for pattern, note in _MISUSED.items():
            if re.match(pattern, str(error)):
                add_note(error, note)
