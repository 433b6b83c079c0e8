"""Ending: how a coordinator is closed, or left, and what it raises then.

`refuse`, `moving`, `close`, `leave` and `read_all` are methods of `Scheduler`.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from typing import TYPE_CHECKING

from .._wakeups import wake_future
from ..completion._stream_queue import stream_queue
from ..errors import DeviceFault
from ..stream import _closing
from ._node import OPEN

if TYPE_CHECKING:
    from typing import Any

    from ._node import Node
    from ._scheduler import Scheduler

__all__ = ["close", "combined", "leave", "moving", "read_all", "refuse"]


def refuse(scheduler: Scheduler) -> None:
    """Register nothing more, and let nothing more into the streams. Any thread.

    What was registered runs. So does an operation whose block has been entered: its verbs go on until it is left.
    """
    scheduler.closing = True
    if scheduler.running is _get_running_loop():  # another loop's streams are closed by their device
        scheduler.streams.refuse()
        _give_up_unentered(scheduler)


def moving(scheduler: Scheduler) -> bool:
    """Will a registered operation come to a stream, or end, without a task that has to do something first? Any thread.

    It waits for a task if it comes behind an event that nobody has recorded, or a block that is not left; or if such
    blocks have all places.
    """
    if scheduler.closed or not (
        scheduler.in_flight < scheduler.max_in_flight or scheduler.in_flight > len(scheduler.open)
    ):
        return False
    return any(_moves(node) for node in list(scheduler.waiting))


def _moves(node: Node[Any]) -> bool:
    """Is it the next one to go on, of those that wait for each other?"""
    return node._state != OPEN and all(other._standing or other._role == "outside" for other in list(node._needs))


async def close(scheduler: Scheduler) -> None:
    """All has finished: close the streams."""
    scheduler.closed = True
    _give_up_unentered(scheduler)
    scheduler.watch.stop()
    scheduler.graph.clear()
    for stream in scheduler.streams.everyone():
        await stream.aclose()


def leave(scheduler: Scheduler) -> None:
    """Withdraw what no stream has, and wait for nothing."""
    scheduler.closing = scheduler.closed = True
    scheduler.streams.refuse()
    _give_up_unentered(scheduler)
    for node in list(scheduler.waiting):
        scheduler.abandon(node)
    for task in scheduler.hosted:
        task.cancel()
    scheduler.watch.stop()
    scheduler.graph.clear()
    scheduler.sweep()
    for stream in scheduler.streams.everyone():
        _closing.give_up(scheduler.device, stream_queue(stream))
    if scheduler.drainers or scheduler.producers:
        scheduler.wakes.wake_all(scheduler.drainers, wake_future)
        scheduler.wakes.wake_all(scheduler.producers, wake_future)


def _give_up_unentered(scheduler: Scheduler) -> None:
    """Blocks that nobody can enter any more: who waits for one is told."""
    for node in list(scheduler.unentered):
        scheduler.abandon(node)


def read_all(scheduler: Scheduler) -> list[BaseException]:
    """What nobody was told of; somebody is now."""
    causes = [cause for cause in scheduler.unread if not cause.delivered]
    scheduler.unread.clear()
    for cause in causes:
        cause.delivered = True
    return [cause.again() for cause in causes]


def combined(failures: list[BaseException]) -> BaseException:
    """What is raised where several failed. A device's fault is one failure, however many saw it."""
    found: list[BaseException] = []
    for failure in failures:
        if isinstance(failure, DeviceFault) and any(isinstance(one, DeviceFault) for one in found):
            continue
        found.append(failure)
    if len(found) == 1:
        return found[0]
    return BaseExceptionGroup(f"{len(found)} operations of the coordinator failed", found)
