"""What the seed decides: how long things take, and what goes first where CUDA leaves it open.

Only `random.Random.random` is drawn from: it is the same on every version of Python, and its neighbours are not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from ..software.rules import Command

__all__ = ["Chance"]

#: Nanoseconds that a verb costs its caller: a query always as much, the others up to it.
QUERY_NS = 1_000

#: Nanoseconds of what the model does not say: a kernel, a fill, a copy within the device.
WORK_NS = 20_000


class Chance:
    """Decisions of one driver.

    Parameters
    ----------
    seed
        The same one decides the same. None decides nothing: everything takes what the model says, the first goes
        first, and nothing is late.
    """

    __slots__ = ("_paces", "_random", "calm")

    def __init__(self, seed: int | None) -> None:
        self.calm = seed is None
        # From a string: it is hashed by SHA-512, and neighbouring seeds have nothing in common.
        self._random = random.Random(f"aiocuda {seed}")
        self._paces: dict[int, float] = {}

    def below(self, limit: int) -> int:
        """An integer from 0 to ``limit`` - 1."""
        return int(self._random.random() * limit)

    def once_in(self, number: int) -> bool:
        """True once in so many times; never where nothing is decided."""
        return not self.calm and self.below(number) == 0

    def between(self, least_ns: int, most_ns: int) -> int:
        """A time between the two, each order of magnitude as likely as the others; the least where all is calm."""
        if self.calm:
            return least_ns
        return round(least_ns * math.pow(most_ns / least_ns, self._random.random()))

    def choose(self, what: Literal["start", "settle"], commands: Sequence[Command]) -> int:
        """`aiocuda.driver.software.rules.Chooser`: any of them, as long as no higher priority is passed over."""
        if self.calm:
            return 0
        if what == "settle":
            return self.below(len(commands))
        highest = commands[0].stream.priority
        return self.below(sum(command.stream.priority == highest for command in commands))

    def length(self, stream: int, modelled_ns: int) -> int:
        """How long a command takes.

        Each stream has a pace of its own, up to a hundred times slower than another's, so that what is first in one
        may come after all that another was given; it changes now and then.
        """
        if self.calm:
            return modelled_ns
        pace = self._paces.get(stream)
        if pace is None or self.below(16) == 0:
            pace = self._paces[stream] = math.pow(10, 3 * self._random.random() - 1.5)
        return max(1, round(modelled_ns * pace * math.pow(4, 2 * self._random.random() - 1)))

    def verb(self) -> int:
        """What a verb costs its caller, so that the device goes on between two of them."""
        return 0 if self.calm else self.below(QUERY_NS)

    def doorbell(self) -> int:
        """How long the device takes to see what was enqueued."""
        if self.calm:
            return 0
        return self.between(200, 50_000) if self.below(4) == 0 else self.below(4_000)

    def wake(self) -> int:
        """How late a notifier rings: at once, or when the operating system has woken somebody (0.03-0.7 ms; 3 seen)."""
        return self.between(1_000, 3_000_000)

    def job(self) -> int:
        """How long a worker thread takes."""
        return self.between(2_000, 2_000_000)
