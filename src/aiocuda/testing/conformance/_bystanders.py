"""Streams beside those of a test, in which a rig looks at memory and sees that others proceed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ._waiting import Array

if TYPE_CHECKING:
    from ._rig import Rig

__all__ = ["Bystanders"]

_NUMBER = 4
_BYTES = 64


class Bystanders:
    """Four streams that do the same; the first that is through counts.

    One would do if each stream had a hardware queue to itself. On a GPU streams share 8 to 32 of them, and what is
    queued behind somebody else's wait stands still with it, which breaks no rule. Streams made one after the other
    have different queues, so that a notifier or a wait of the test's own does not stop all four.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._round = 0
        self.streams = [rig.stream() for _ in range(_NUMBER)]
        self._memory = [(rig.memory(_BYTES), rig.memory(_BYTES)) for _ in self.streams]
        self._host = [(rig.small(_BYTES), rig.small(_BYTES)) for _ in self.streams]

    def look(self, address: int, count: int, dtype: str) -> Array:
        """What stands in device memory now."""
        targets = [self._rig.small(count, dtype) for _ in self.streams]

        def download(index: int) -> None:
            target = targets[index]
            self._rig.driver.download(self.streams[index], target.ctypes.data, address, target.nbytes)

        return targets[self._do("a look at device memory", download)]

    def work(self) -> None:
        """See one operation of each kind through, from a value that goes up to its return."""
        rig, driver = self._rig, self._rig.driver
        self._round += 1

        def everything(index: int) -> None:
            stream = self.streams[index]
            first, second = self._memory[index]
            source, target = self._host[index]
            source[:] = self._round % 256
            driver.upload(stream, first, source.ctypes.data, _BYTES)
            driver.copy(stream, second, first, _BYTES)
            rig.affine(stream, second, _BYTES // 4, 1, 0)
            driver.fill(stream, first, b"\x00", _BYTES)
            driver.download(stream, target.ctypes.data, second, _BYTES)

        index = self._do("work in a stream that nothing holds", everything)
        assert (self._host[index][1] == self._round % 256).all()

    def _do(self, what: str, enqueue: Callable[[int], None]) -> int:
        """Let every idle bystander do something; the index of one that is through."""
        query = self._rig.driver.stream_query
        busy = [index for index, stream in enumerate(self.streams) if query(stream)]
        for index in busy:
            enqueue(index)
        through: list[int] = []

        def one_is_through() -> bool:
            through.extend(index for index in busy if query(self.streams[index]))
            return bool(through)

        self._rig.wait_until(one_is_through, what)
        return through[0]
