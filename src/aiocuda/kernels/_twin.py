"""Twin: a kernel's stand-in, called where it is not seen by the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

__all__ = ["out_of_loop"]


def out_of_loop(twin: Callable[..., object]) -> Callable[..., object]:
    """The twin, with no event loop running around it.

    A driver without threads calls it on the loop's own, in the middle of a verb. Whatever of the library it called
    there would go on as if the program had; so it finds what it finds on a worker thread: no loop, and a refusal.
    """
    if not inspect.isgeneratorfunction(twin):
        return functools.partial(_call, twin)

    def bit_by_bit(*args: Any, **keywords: Any) -> Generator[Any, Any, Any]:
        running = twin(*args, **keywords)
        told: Any = None
        try:
            while True:
                try:
                    nap = _call(running.send, told)
                except StopIteration as end:
                    return end.value
                told = yield nap
        finally:
            _call(running.close)

    return bit_by_bit


def _call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    loop = asyncio._get_running_loop()
    if loop is None:
        return function(*args, **keywords)
    asyncio._set_running_loop(None)
    try:
        return function(*args, **keywords)
    finally:
        asyncio._set_running_loop(loop)
        del loop  # a traceback of the twin's, which a latched fault keeps, keeps this frame
