"""PolledWait: a wait for a function of the program that says whether work is done."""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Callable

from .._base._user_code import LEAVES_LOOP, failure_of
from .._core import DONE
from ..errors import InvalidTypeError
from ._alarm import A_LONG_TURN, Alarm
from ._loop_end import end_with_loop
from ._waits import Wait, described

__all__ = ["PolledWait"]

#: Seconds until the first call, and the most seconds between two calls. In between, a call comes after an eighth of the
#: time that the wait has taken.
FIRST = 50e-6
LONGEST = 0.005
PART = 1 / 8


class PolledWait(Wait):
    """A wait that is done when a function returns True. The loop calls the function while the wait has a waiter."""

    __slots__ = ("_function", "_poller")

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: object, function: Callable[[], object]) -> None:
        super().__init__(loop, keep)
        self._function = function
        self._poller = _Poller.of(loop)

    def _begin(self) -> None:
        self._poller.add(self)

    def _leave(self) -> None:
        self._poller.remove(self)

    def _look(self) -> None:
        if self.status >= DONE:
            return
        try:
            answer = self.context.copy().run(self._function)
        except BaseException as error:
            self.finish(failure_of(error))
            if isinstance(error, LEAVES_LOOP):
                raise
            return
        if answer is True:
            self.finish()
        elif answer is not False:
            text = f"{described(self._function)} returned {described(answer)}: a polled function returns a bool"
            self.finish(InvalidTypeError(text))

    def look(self) -> None:
        """Call the function."""
        self._look()


class _Poller:
    """Calls the functions of one event loop, by one alarm."""

    __slots__ = ("__weakref__", "_alarm", "_end", "_now", "_waits", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # uvloop's time is that at which the turn began; a simulated loop has a time of its own.
        self._now = time.monotonic if abs(loop.time() - time.monotonic()) < A_LONG_TURN else loop.time
        self._waits: dict[PolledWait, tuple[float, float]] = {}  # the begin of each, and the time of its next call
        self._alarm = Alarm(loop, self._now, self._alarmed, watches=True)
        self._end = end_with_loop(self)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Poller:
        """Return the poller of the running loop."""
        poller = _pollers.get(id(loop))
        if poller is None or poller.loop is not loop:
            poller = _pollers[id(loop)] = cls(loop)
        return poller

    @property
    def is_used(self) -> bool:
        return bool(self._waits)

    def add(self, wait: PolledWait) -> None:
        """Call the function of a wait until `remove`."""
        now = self._now()
        self._waits[wait] = (now, now + FIRST)
        self._alarm.set(now + FIRST, now)

    def remove(self, wait: PolledWait) -> None:
        """Call the function of a wait no longer. Does nothing if it is not called."""
        self._waits.pop(wait, None)

    def _alarmed(self, now: float) -> None:
        reached = max(now + self._alarm.early, self._alarm.reached)
        due = [wait for wait, (_, when) in self._waits.items() if when <= reached]
        try:
            for wait in due:
                if wait in self._waits:  # else an earlier function has ended it
                    wait.look()
        finally:  # Ctrl-C: the others are still called
            now = self._now()
            for wait in due:
                if wait in self._waits:
                    begun, _ = self._waits[wait]
                    self._waits[wait] = (begun, now + min(max((now - begun) * PART, FIRST), LONGEST))
            following = min((when for _, when in self._waits.values()), default=math.inf)
            if following < math.inf:
                self._alarm.set(following, now)

    def close(self) -> None:
        """Stop the alarm."""
        self._alarm.close()
        _pollers.pop(id(self.loop), None)


#: By the id of the loop. The loop holds its poller by the alarm.
_pollers: weakref.WeakValueDictionary[int, _Poller] = weakref.WeakValueDictionary()
