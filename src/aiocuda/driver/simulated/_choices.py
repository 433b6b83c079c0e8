"""The decisions of the seed: durations, delays, and the order of unordered commands.

Only `random.Random.random` is used: it returns the same numbers in every version of Python, other methods do not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from ..software.rules import Command

__all__ = ["QUERY_NS", "WORK_NS", "SeededChoices"]

#: Nanoseconds that a method takes: a query always as many, the others up to it.
QUERY_NS = 1_000

#: Nanoseconds of work that has no modelled time: a kernel, a fill, a copy within the device.
WORK_NS = 20_000


class SeededChoices:
    """The decisions of one driver.

    Parameters
    ----------
    seed
        Equal seeds give equal decisions. None: every duration is that of the model, the first command goes first, and
        nothing is delayed.
    """

    __slots__ = ("_is_fixed", "_paces", "_random")

    def __init__(self, seed: int | None) -> None:
        self._is_fixed = seed is None
        # A string is hashed with SHA-512, so that the numbers of neighbouring seeds are unrelated.
        self._random = random.Random(f"aiocuda {seed}")
        self._paces: dict[int, float] = {}

    def below(self, limit: int) -> int:
        """Return an integer from 0 to ``limit`` - 1."""
        return int(self._random.random() * limit)

    def once_in(self, number: int) -> bool:
        """Return True once in ``number`` calls on average; never without a seed."""
        return not self._is_fixed and self.below(number) == 0

    def between(self, least_ns: int, most_ns: int) -> int:
        """Return a time between two, with equal probability for each order of magnitude; the least without a seed."""
        if self._is_fixed:
            return least_ns
        return round(least_ns * math.pow(most_ns / least_ns, self._random.random()))

    def choose(self, what: Literal["start", "settle"], commands: Sequence[Command]) -> int:
        """Return the index of any command, without passing over a higher priority. `software.rules.Chooser`."""
        if self._is_fixed:
            return 0
        if what == "settle":
            return self.below(len(commands))
        highest = commands[0].stream.priority
        return self.below(sum(command.stream.priority == highest for command in commands))

    def duration_ns(self, stream: int, modelled_ns: int) -> int:
        """Return the duration of a command.

        Each stream has its own pace, up to a hundred times slower than another's. The first command of one stream can
        therefore end after all commands of another. The pace changes once in 16 commands on average.
        """
        if self._is_fixed:
            return modelled_ns
        pace = self._paces.get(stream)
        if pace is None or self.below(16) == 0:
            pace = self._paces[stream] = math.pow(10, 3 * self._random.random() - 1.5)
        return max(1, round(modelled_ns * pace * math.pow(4, 2 * self._random.random() - 1)))

    def call_ns(self) -> int:
        """Return the duration of a method call. The device proceeds between two calls."""
        return 0 if self._is_fixed else self.below(QUERY_NS)

    def submission_delay_ns(self) -> int:
        """Return the time until the device sees an enqueued command."""
        if self._is_fixed:
            return 0
        return self.between(200, 50_000) if self.below(4) == 0 else self.below(4_000)

    def notification_delay_ns(self) -> int:
        """Return the delay of a notification. An operating system wakes a thread in 0.03-0.7 ms; 3 ms were measured."""
        return self.between(1_000, 3_000_000)

    def job_ns(self) -> int:
        """Return the time until a worker thread runs offloaded work."""
        return self.between(2_000, 2_000_000)
