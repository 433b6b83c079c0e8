"""Ending: how a coordinator is closed, or left, and what it raises then.

`refuse`, `moving`, `close`, `leave` and `read_all` are methods of `Flow`.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from typing import TYPE_CHECKING

from ..errors import DeviceFault
from ..stream import closing
from ..waking import wake_future
from .node import OPEN

if TYPE_CHECKING:
    from typing import Any

    from .flow import Flow
    from .node import Node

__all__ = ["close", "combined", "leave", "moving", "read_all", "refuse"]


def refuse(flow: Flow) -> None:
    """Register nothing more, and let nothing more into the streams. Any thread.

    What was registered runs. So does an operation whose block has been entered: its verbs go on until it is left.
    """
    flow.closing = True
    if flow.running is _get_running_loop():  # another loop's streams are closed by their device
        flow.streams.refuse()
        _give_up_unentered(flow)


def moving(flow: Flow) -> bool:
    """Will a registered operation come to a stream, or end, without a task that has to do something first? Any thread.

    It waits for a task if it comes behind an event that nobody has recorded, or a block that is not left; or if such
    blocks have all places.
    """
    if flow.closed or not (flow.in_flight < flow.max_in_flight or flow.in_flight > len(flow.open)):
        return False
    return any(_moves(node) for node in list(flow.waiting))


def _moves(node: Node[Any]) -> bool:
    """Is it the next one to go on, of those that wait for each other?"""
    return node._state != OPEN and all(other._standing or other._role == "outside" for other in list(node._needs))


async def close(flow: Flow) -> None:
    """All has finished: close the streams."""
    flow.closed = True
    _give_up_unentered(flow)
    flow.watch.stop()
    flow.graph.clear()
    for stream in flow.streams.everyone():
        await stream.aclose()


def leave(flow: Flow) -> None:
    """Withdraw what no stream has, and wait for nothing."""
    flow.closing = flow.closed = True
    flow.streams.refuse()
    _give_up_unentered(flow)
    for node in list(flow.waiting):
        flow.abandon(node)
    for task in flow.hosted:
        task.cancel()
    flow.watch.stop()
    flow.graph.clear()
    flow.sweep()
    for stream in flow.streams.everyone():
        closing.give_up(flow.device, stream._lane)
    if flow.drainers or flow.producers:
        flow.wakes.wake_all(flow.drainers, wake_future)
        flow.wakes.wake_all(flow.producers, wake_future)


def _give_up_unentered(flow: Flow) -> None:
    """Blocks that nobody can enter any more: who waits for one is told."""
    for node in list(flow.unentered):
        flow.abandon(node)


def read_all(flow: Flow) -> list[BaseException]:
    """What nobody was told of; somebody is now."""
    causes = [cause for cause in flow.unread if not cause.delivered]
    flow.unread.clear()
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
