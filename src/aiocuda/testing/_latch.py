"""Holding a stream, so that a test decides when its work goes on."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Self

from ..errors import BusyError, ClosedError
from .kernels import HOLD, HOLDING, RAN_OUT

if TYPE_CHECKING:
    from types import TracebackType

    from .._device import Device
    from ..completion._operation import Operation
    from ..kernels import Kernel
    from ..memory._pinned import PinnedBuffer
    from ..stream import Stream

__all__ = ["Latch"]

_MOST = 64


class Latch:
    """Holds streams until it is released: a kernel in each of them spins on a flag in pinned memory.

    Nothing behind a held kernel runs, so a test sees what it wants to see without a sleep::

        with Latch(device) as latch:
            latch.hold(stream)
            operation = stream.fill(buffer, 1)
            await latch.held()
            assert not operation.done()
            latch.release()
            await operation

    Leaving the block releases. A held kernel ends by itself after ``seconds``, so that a test that dies leaves no
    device spinning; `held` and `release` say so if it comes to that, since nothing was held then.

    Parameters
    ----------
    device
        Whose streams are to be held.
    seconds
        The most that a held kernel runs.
    """

    def __init__(self, device: Device, *, seconds: float = 10.0) -> None:
        self._device = device
        self._seconds = seconds
        self._kernel: Kernel | None = None
        self._words: PinnedBuffer | None = None  # made by the first hold, which has a running loop; one row per kernel
        self._held: list[int] = []  # rows of kernels that were not seen to end
        self._free = list(range(_MOST))
        self._closed = False

    def hold(self, stream: Stream) -> Operation[None]:
        """Enqueue a kernel that runs until `release`. Its operation is done once it was released.

        Raises
        ------
        ClosedError
            The latch's block was left.
        BusyError
            The latch holds 64 kernels.
        """
        if self._closed:
            raise ClosedError("this latch was released for good when its block was left; make a new one")
        kernel, words = self._prepare()
        row = self._take_row(words)
        words[row] = 0
        operation = stream.launch(kernel, 1, 1, words[row], int(self._seconds * 1e9))
        self._held.append(row)
        return operation

    async def held(self) -> None:
        """Wait until every held kernel runs. Two of them in one stream never do at once.

        Raises
        ------
        AssertionError
            One of them ended by itself.
        """
        words = self._prepare()[1]
        while not all(words[row, 0] for row in self._held):  # noqa: ASYNC110 - a kernel writes memory and wakes nobody
            await asyncio.sleep(0.001)
        self._check()

    def release(self) -> None:
        """Let every kernel held so far end, also those that did not start yet. A later `hold` holds again.

        Raises
        ------
        AssertionError
            One of them had ended by itself before.
        """
        self._open()
        self._check()

    @property
    def running(self) -> int:
        """How many held kernels run at this moment."""
        words = self._words
        return 0 if words is None else sum(int(words[row, 0]) == HOLDING for row in self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._open()
        if error is None:
            self._check()

    def __repr__(self) -> str:
        return f"<Latch of {self._device!r}, {self.running} kernels held>"

    def _prepare(self) -> tuple[Kernel, PinnedBuffer]:
        if self._kernel is None or self._words is None:
            self._kernel = _hold()
            self._words = self._device.pinned((_MOST, 2), "u4")
            self._words[:] = 0
        return self._kernel, self._words

    def _take_row(self, words: PinnedBuffer) -> int:
        if not self._free:  # a kernel writes its state last of all: what has ended touches its row no more
            self._free = [row for row in self._held if int(words[row, 0]) > HOLDING]
            self._held = [row for row in self._held if row not in self._free]
        if not self._free:
            raise BusyError(f"this latch holds {_MOST} kernels; release them, or use another latch", limit=_MOST)
        return self._free.pop()

    def _open(self) -> None:
        if self._words is not None:
            for row in self._held:
                self._words[row, 1] = 1

    def _check(self) -> None:
        if self._words is not None and any(int(self._words[row, 0]) == RAN_OUT for row in self._held):
            raise AssertionError(
                f"a held kernel ended by itself after {self._seconds:g} s, so that nothing was held from then on: "
                "release sooner, or give the latch more seconds"
            )


@functools.cache
def _hold() -> Kernel:
    """The kernel of all latches: loading one of its own beside a held kernel would wait for that to end."""
    from ..kernels import Kernel

    return Kernel(HOLD.name, source=HOLD.source, host=HOLD.host)
