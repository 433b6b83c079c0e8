"""Waiting that cannot hang and does not guess: conditions with a deadline, held kernels, and a watchdog."""

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

#: Lets some time pass, between two looks at a condition.
Pause: TypeAlias = Callable[[], object]

#: How often a condition is looked at. Short against every time bound, long against a turn of a host driver's thread.
_TICK = 0.0005


def nap() -> None:
    """Sleep a little."""
    time.sleep(_TICK)  # noqa: TID251 - between two looks at a condition that has a deadline


def wait_until(condition: Callable[[], bool], what: str, seconds: float, pause: Pause = nap) -> None:
    """Return once ``condition()`` holds; past ``seconds``, fail with ``what`` should have come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        pause()


@contextlib.contextmanager
def unblocked(what: str, seconds: float, rescue: Callable[[], object]) -> Iterator[None]:
    """Fail if the body is not through within ``seconds``.

    ``rescue`` is called then, from another thread, so that the body can end; the failure shows where it stood.
    """
    stuck: list[str] = []
    caller = threading.get_ident()

    def bite() -> None:
        stuck.append("".join(traceback.format_stack(sys._current_frames().get(caller), limit=12)))
        rescue()

    watchdog = threading.Timer(seconds, bite)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
    if stuck:
        raise AssertionError(f"{what} blocked its caller for {seconds:g} s, here:\n{stuck[0]}")


class Hold:
    """A kernel that runs until it is released, or until its own time is up.

    Parameters
    ----------
    words
        What it shares with the host: its state, and the word that releases it.
    patience
        Seconds to wait for it to start.
    pause
        Lets time pass meanwhile.
    """

    def __init__(self, words: Array, patience: float, pause: Pause = nap) -> None:
        self._words = words
        self._patience = patience
        self._pause = pause

    @property
    def started(self) -> bool:
        """Has the kernel started?"""
        return int(self._words[0]) != 0

    @property
    def running(self) -> bool:
        """Has the kernel started, and not ended?"""
        return int(self._words[0]) == HOLDING

    def wait_running(self) -> None:
        """Return once the kernel has started."""
        wait_until(lambda: self.started, "a held kernel starts", self._patience, self._pause)
        assert self.running, "a held kernel ended before it was released"

    def release(self) -> None:
        """Let the kernel end. If its time was up already, nothing was held, and that fails."""
        assert int(self._words[0]) != RAN_OUT, "a held kernel's time was up before its release: raise hold_seconds"
        self._words[1] = 1
