"""Finding calls that block an event loop.

Two nets. A thread asks the loop for a sign of life every 50 ms; if none comes for 250 ms, it notes where the loop's
thread stands. That finds whatever is slow, C code too. blockbuster, if it is installed, finds at once and by name the
calls that *may* block: sleeps, files, locks and pipes.

Both look at calls made by aiocuda only. What a test does for itself on its loop is its own business.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    import asyncio

__all__ = ["LoopGuard"]

_TICK: Final = 0.05
_MISSES: Final = 5

_TESTING: Final = str(Path(__file__).parent)
_PACKAGE: Final = str(Path(__file__).parent.parent)


class LoopGuard:
    """Fails its block if aiocuda blocks an event loop inside it.

    Parameters
    ----------
    loop
        The loop that runs on the calling thread.

    Attributes
    ----------
    stalls : list of str
        Where the loop's thread stood each time that it was found blocked in aiocuda.

    Raises
    ------
    AssertionError
        At the end of the block, if there was a stall.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._caller = threading.get_ident()
        self._over = threading.Event()
        self._answered = threading.Event()
        self.stalls: list[str] = []
        self._named = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._watch, name="aiocuda-loop-guard", daemon=True)

    def __enter__(self) -> Self:
        if importlib.util.find_spec("blockbuster") is not None:
            from blockbuster import blockbuster_ctx

            self._named.enter_context(blockbuster_ctx("aiocuda", excluded_modules=["aiocuda.testing"]))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._named.close()
        if error is None and self.stalls:
            raise AssertionError(f"a call of aiocuda blocked the event loop:\n{self.stalls[0]}")

    def _watch(self) -> None:
        # Ticks are counted, not seconds: a machine that is too busy to run this thread is no blocked loop.
        misses = 0
        asked = False
        while not self._over.wait(_TICK):
            if not self._loop.is_running():
                misses = 0
            elif not asked or self._answered.is_set():
                misses, asked = 0, True
                self._answered.clear()
                with contextlib.suppress(RuntimeError):  # closed since it was asked
                    self._loop.call_soon_threadsafe(self._answered.set)
            else:
                misses += 1
                if misses == _MISSES:
                    self._note(sys._current_frames().get(self._caller))

    def _note(self, frame: FrameType | None) -> None:
        if any(_is_ours(each.filename) for each in traceback.extract_stack(frame)):
            self.stalls.append("".join(traceback.format_stack(frame)))


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE + os.sep) and not filename.startswith(_TESTING + os.sep)
