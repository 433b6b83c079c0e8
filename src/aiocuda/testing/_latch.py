"""`Latch`: holds a stream until the test releases it."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Self

from .._base._mistakes import or_none, refuses
from ..errors import BusyError, ClosedError, InvalidTypeError
from .kernels import HOLD, HOLDING, RAN_OUT

if TYPE_CHECKING:
    from types import TracebackType

    from ..completion import Operation
    from ..device import Device
    from ..kernels import Kernel
    from ..memory import PinnedBuffer
    from ..stream import Stream

__all__ = ["Latch"]

#: The most kernels of one latch.
_MOST = 64


@refuses(__aenter__="is entered by `with`, not `async with`: `with Latch(device) as latch`")
class Latch:
    """Holds streams until it is released: in each stream a kernel spins on a flag in pinned memory.

    Later work of a held stream does not run, so a test needs no sleep::

        with Latch(device) as latch:
            latch.hold(stream)
            operation = stream.fill(buffer, 1)
            await latch.held()
            assert not operation.done()
            latch.release()
            await operation

    Leaving the block releases. A held kernel ends by itself after ``seconds``, so that a test that dies leaves no
    kernel running. If that happens, `held`, `release` and the end of the block raise `AssertionError`.

    Parameters
    ----------
    device
        The device of the streams.
    seconds
        The longest time that a held kernel runs.
    """

    def __init__(self, device: Device, *, seconds: float = 10.0) -> None:
        from ..device import Device

        if not isinstance(device, Device):
            raise InvalidTypeError(f"a latch is made for an aiocuda.Device, Latch(device), not {type(device).__name__}")
        self._device = device
        self._seconds = seconds
        self._kernel: Kernel | None = None
        self._words: PinnedBuffer | None = None  # allocated by the first hold, in a running loop; one row per kernel
        self._held: dict[int, Operation[None]] = {}  # by row: kernels that may still run
        self._free = list(range(_MOST))
        self._closed = False

    @or_none
    def hold(self, stream: Stream) -> Operation[None]:
        """Enqueue a kernel that runs until `release`, and return its operation.

        Raises
        ------
        ClosedError
            The block of the latch has ended.
        BusyError
            The latch holds 64 kernels.
        """
        if self._closed:
            raise ClosedError("this latch was released when its block ended; make a new one")
        from ..stream import Stream

        if not isinstance(stream, Stream):
            raise InvalidTypeError(f"a latch holds an aiocuda.Stream, latch.hold(stream), not {type(stream).__name__}")
        kernel, words = self._prepare()
        row = self._take_row(words)
        words[row] = 0
        operation = stream.launch(kernel, 1, 1, words[row], int(self._seconds * 1e9))
        self._held[row] = operation
        return operation

    async def held(self) -> None:
        """Wait until every held kernel runs. Two kernels in one stream never run at the same time.

        Raises
        ------
        AssertionError
            A kernel ended by itself.
        Exception
            A kernel will never run, because its operation has failed; this is the error.
        """
        words = self._prepare()[1]
        while missing := [operation for row, operation in self._held.items() if not words[row, 0]]:
            for operation in missing:
                if operation.state == "failed":
                    operation.result()
            await asyncio.sleep(0.001)  # the kernel only writes memory
        self._check()

    def release(self) -> None:
        """Let every kernel held so far end, also kernels that have not started yet. A later `hold` holds again.

        Raises
        ------
        AssertionError
            A kernel had ended by itself before.
        """
        self._open()
        self._check()

    @property
    def running(self) -> int:
        """The number of held kernels that run now."""
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
        if not self._free:  # a kernel writes its state last, so the row of an ended kernel can be used again
            self._free = [row for row in self._held if int(words[row, 0]) > HOLDING]
            for row in self._free:
                del self._held[row]
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
                f"a held kernel ended by itself after {self._seconds:g} s and held nothing after that: release sooner, "
                "or give the latch more seconds"
            )


@functools.cache
def _hold() -> Kernel:
    """Return the kernel of all latches. Loading another kernel would wait for a held one to end."""
    from ..kernels import Kernel

    return Kernel(HOLD.name, source=HOLD.source, host=HOLD.host)
