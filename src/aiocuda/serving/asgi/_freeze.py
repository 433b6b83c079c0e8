"""Freezing: keeps the objects of the start of a service out of garbage collections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from typing import Final

from ..._base._advice import advise, is_advice_wanted
from ..._base._collections import COLLECTIONS, Collection
from ..._base._types import SourceLine

__all__ = ["advised", "frozen"]

#: With so many frozen objects, the program has frozen some. Python 3.12 starts with 375.
FROZEN_BY_PROGRAM: Final = 1000

#: Seconds of a collection that are worth a warning.
LONG: Final = 0.02


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Collect garbage, and keep all objects that are left out of collections in the block.

    It does nothing if the program has frozen objects, or has disabled the collector.
    """
    if gc.get_freeze_count() >= FROZEN_BY_PROGRAM or not gc.isenabled():
        yield
        return
    COLLECTIONS.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def advised(line: SourceLine) -> Iterator[None]:
    """Warn about the first long collection in the block, once for each line of the program."""
    if not is_advice_wanted():
        yield
        return
    loop = asyncio.get_running_loop()

    def observe(collection: Collection) -> None:
        """Called by the collector, in any thread and at any line: the loop warns."""
        if collection.seconds >= LONG and not collection.intended and observe in COLLECTIONS.observers:
            COLLECTIONS.observers.remove(observe)
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_advise, line, collection)

    COLLECTIONS.observers.append(observe)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # it has removed itself
            COLLECTIONS.observers.remove(observe)


def _advise(line: SourceLine, collection: Collection) -> None:
    advise(
        "garbage collections",
        line,
        f"{collection}: meanwhile no request was served. Let lifespan() freeze the objects of the start, freeze=True, "
        "or call gc.collect() and gc.freeze() when everything is loaded",
    )
