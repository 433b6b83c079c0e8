"""Captured: what a verb returns while its stream is captured. It has not been enqueued, and never will be."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .._wakeups import Waiters
from ..completion._operation import Operation, new_operation
from ..completion._stream_queue import StreamQueue
from ..errors import BusyError

if TYPE_CHECKING:
    from ._recorder import Recorder

__all__ = ["CAPTURED", "Captured"]

T_co = TypeVar("T_co", covariant=True)

#: Its state, before all that an enqueued operation goes through.
CAPTURED = -1


class Captured(Operation[T_co]):
    """A place in a graph: what other streams wait for meanwhile, and what `Graph.update` changes later."""

    __slots__ = ("_after", "_index", "_recorder")

    _recorder: Recorder
    _after: tuple[int, ...]  # the steps that whoever waits for it waits for
    _index: int | None  # its own step, if it has one: a wait has none

    @classmethod
    def into(
        cls, recorder: Recorder, queue: StreamQueue, kind: str, after: tuple[int, ...], index: int | None
    ) -> Captured[Any]:
        """What has just been recorded."""
        captured: Captured[Any] = new_operation(queue, kind, None, None, cls)
        captured._recorder = recorder
        captured._after = after
        captured._index = index
        captured.status = CAPTURED
        captured.waiters = Waiters()  # so that whoever would wait asks `add_waiter`
        return captured

    @property
    def state(self) -> str:
        """``"captured"``."""
        return "captured"

    def _refuse(self) -> NoReturn:
        raise BusyError(
            f"{self!r} was recorded into a graph and does not run by itself: leave the `with stream.capture()` "
            "block, then `await graph.launch(stream)`"
        )

    def add_waiter(self, waiter: Any) -> NoReturn:
        self._refuse()

    def __await__(self) -> Generator[Any, None, T_co]:
        self._refuse()

    async def wait(self) -> T_co:
        """`BusyError`: it does not run by itself."""
        self._refuse()

    async def settle(self) -> None:
        """`BusyError`: it does not run by itself."""
        self._refuse()

    def result(self) -> T_co:
        """`BusyError`: it does not run by itself."""
        self._refuse()

    def exception(self) -> BaseException | None:
        """`BusyError`: it does not run by itself."""
        self._refuse()

    def add_done_callback(self, fn: Any, *, context: Any = None) -> None:
        """`BusyError`: it does not run by itself."""
        self._refuse()

    def remove_done_callback(self, fn: Any) -> int:
        """0: there are none."""
        return 0

    def abandon(self) -> bool:
        """`BusyError`: it does not run by itself."""
        self._refuse()


def task_name() -> str:
    """Who is running, for messages."""
    task = asyncio.current_task()
    return "no task" if task is None else task.get_name()
