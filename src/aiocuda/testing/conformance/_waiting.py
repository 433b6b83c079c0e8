"""Waiting with a deadline: for conditions, for held kernels, and for calls that must not block."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from ..kernels import HOLDING, RAN_OUT

__all__ = ["Array", "Hold", "Pause", "nap", "unblocked", "wait_until"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Lets some time pass between two checks of a condition.
Pause: TypeAlias = Callable[[], object]

#: Seconds between two checks: short against all time limits, long against the work of a host driver's thread.
_TICK = 0.0005


def nap() -> None:
    """Sleep a little."""
    time.sleep(_TICK)  # noqa: TID251 - between two checks of a condition with a deadline


def wait_until(condition: Callable[[], bool], what: str, seconds: float, pause: Pause = nap) -> None:
    """Return once ``condition()`` is true. After ``seconds``, fail with the text ``what``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        pause()


@contextlib.contextmanager
def unblocked(what: str, seconds: float, rescue: Callable[[], object]) -> Iterator[None]:
    """Fail if the body takes more than ``seconds``.

    Another thread then calls ``rescue``, so that the body can end. The failure shows the stack at that time.
    """
    stuck: list[str] = []
    caller = threading.get_ident()

    def expire() -> None:
        stuck.append("".join(traceback.format_stack(sys._current_frames().get(caller), limit=12)))
        rescue()

    watchdog = threading.Timer(seconds, expire)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
    if stuck:
        raise AssertionError(f"{what} blocked its caller for {seconds:g} s, here:\n{stuck[0]}")


class Hold:
    """A kernel that runs until it is released, or for a limited time.

    Parameters
    ----------
    words
        The memory that it shares with the host: its state, and the word that releases it.
    patience
        Seconds to wait for its start.
    pause
        Lets time pass while waiting.
    """

    def __init__(self, words: Array, patience: float, pause: Pause = nap) -> None:
        self._words = words
        self._patience = patience
        self._pause = pause

    @property
    def started(self) -> bool:
        """True if the kernel has started."""
        return int(self._words[0]) != 0

    @property
    def running(self) -> bool:
        """True if the kernel has started and not ended."""
        return int(self._words[0]) == HOLDING

    def wait_running(self) -> None:
        """Return once the kernel has started."""
        wait_until(lambda: self.started, "a held kernel starts", self._patience, self._pause)
        assert self.running, "a held kernel ended before it was released"

    def release(self) -> None:
        """Let the kernel end. Fail if it had already ended by itself."""
        assert int(self._words[0]) != RAN_OUT, "a held kernel ended by itself before its release: raise hold_seconds"
        self._words[1] = 1
