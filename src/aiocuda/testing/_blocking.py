"""`LoopGuard`: finds calls of aiocuda that block an event loop.

It uses two methods. The thread that samples late loops schedules a callback on the loop every 50 ms; if the callback
does not run for 250 ms, the thread records the stack of the loop's thread. This finds every slow call, also in C code.
blockbuster, if it is installed, reports calls that *may* block, by name: sleeps, files, locks and pipes.

Both check only calls made by aiocuda, not those made by the test itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Self

from .._base._loop_watch import cancel_sample, sample_at
from .._base._stacks import formatted, stack_of

if TYPE_CHECKING:
    import asyncio

__all__ = ["LoopGuard"]

#: Seconds between two checks, and the number of missed checks in a row that count as blocking.
_TICK: Final = 0.05
_MISSES: Final = 5

_TESTING: Final = str(Path(__file__).parent)
_PACKAGE: Final = str(Path(__file__).parent.parent)


class LoopGuard:
    """Raises at the end of its block if aiocuda has blocked an event loop inside it.

    Parameters
    ----------
    loop
        The loop of the calling thread.

    Attributes
    ----------
    stalls : list of str
        The stack of the loop's thread, for each time that it was blocked in aiocuda.

    Raises
    ------
    AssertionError
        There was a stall.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._caller = threading.get_ident()
        self._ended = False
        self._answered = True  # the loop has run the last callback
        self._misses = 0
        self.stalls: list[str] = []
        self._blockbuster = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if importlib.util.find_spec("blockbuster") is not None:
            from blockbuster import blockbuster_ctx

            self._blockbuster.enter_context(blockbuster_ctx("aiocuda", excluded_modules=["aiocuda.testing"]))
        sample_at(self, time.monotonic() + _TICK)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        cancel_sample(self)
        self._blockbuster.close()
        if error is None and self.stalls:
            raise AssertionError(f"a call of aiocuda blocked the event loop:\n{self.stalls[0]}")

    def sample(self) -> None:
        """Check once whether the loop runs its callbacks. Called by the thread that samples, every 50 ms."""
        if self._ended:
            return
        # Counts ticks of this thread, not seconds: on a busy machine this thread may be delayed, too.
        if not self._loop.is_running():
            self._misses = 0
        elif self._answered:
            self._misses, self._answered = 0, False
            with contextlib.suppress(RuntimeError):  # the loop was closed after `is_running`
                self._loop.call_soon_threadsafe(self._answer)
        else:
            self._misses += 1
            if self._misses == _MISSES:
                self._record(stack_of(self._caller))
        sample_at(self, time.monotonic() + _TICK)

    def _answer(self) -> None:
        self._answered = True

    def _record(self, stack: list[FrameType]) -> None:
        if any(_is_aiocuda(frame.f_code.co_filename) for frame in stack):
            self.stalls.append(formatted(stack))


def _is_aiocuda(filename: str) -> bool:
    return filename.startswith(_PACKAGE + os.sep) and not filename.startswith(_TESTING + os.sep)
