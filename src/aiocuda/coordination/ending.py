"""Ending: how a coordinator is closed, or left, and what it raises then.

`close`, `leave` and `read_all` are methods of `Flow`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import DeviceFault
from ..stream import closing
from .watching import tell

if TYPE_CHECKING:
    from .flow import Flow

__all__ = ["close", "combined", "leave", "read_all"]


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
    flow.closed = True
    _give_up_unentered(flow)
    for node in list(flow.waiting):
        flow.abandon(node)
    for task in flow.hosted:
        task.cancel()
    flow.watch.stop()
    flow.graph.clear()
    flow.sweep()
    for stream in flow.streams.everyone():
        closing.leave(flow.device, stream._lane)
    tell(flow.drainers)
    tell(flow.producers)


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
