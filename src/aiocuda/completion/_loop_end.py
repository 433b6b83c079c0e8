"""The end of what waits use in an event loop: no device that the program closes has it."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import AsyncGenerator
from typing import Protocol

__all__ = ["end_with_loop"]

#: Loops whose ``shutdown_asyncgens`` has run: they warn of further generators.
_shut_down: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


class HasEnd(Protocol):
    """An object that the descriptors of its loop hold, so that it is collected with the loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_used(self) -> bool:
        """True while a wait is pending."""

    def close(self) -> None:
        """Release everything. The loop may be closed already."""


#: All objects that have not ended. Each reference removes itself when its object is collected.
_known: dict[weakref.ref[HasEnd], None] = {}


def end_with_loop(thing: HasEnd) -> object:
    """Close an object with the running loop; return a generator that the object must hold.

    ``shutdown_asyncgens``, which `asyncio.run` and servers call, closes it. Where a wait is still pending then, or
    where the loop is closed without that call, the loop's end releases it, or else the next call of this function in
    the process does.
    """
    for known in list(_known):
        found = known()
        if found is not None and found.loop.is_closed():
            _known.pop(known, None)
            found.close()
    _known[weakref.ref(thing, lambda gone: _known.pop(gone, None))] = None
    loop = thing.loop
    if loop in _shut_down or getattr(loop, "_asyncgens_shutdown_called", False):
        return None
    generator = _until_shutdown(weakref.ref(thing), weakref.ref(loop))
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(finalizer=None)  # which would hold the loop, and schedule a call in it
    try:
        generator.asend(None).send(None)
    except StopIteration:
        pass  # it has reached its `yield`
    finally:
        sys.set_asyncgen_hooks(*hooks)
    return generator


async def _until_shutdown(
    thing: weakref.ref[HasEnd], loop: weakref.ref[asyncio.AbstractEventLoop]
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        found, running = thing(), loop()
        if found is not None and running is not None:  # else the object is collected, and the loop goes on
            _shut_down.add(running)
            if not found.is_used:
                found.close()
