"""QueueWatch: finds more busy streams than hardware queues, where streams wait for each other on the device.

`log_few_queues` logs that CUDA has fewer queues than aiocuda would have asked for.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from .._base._advice import advise
from .._base._log import log
from .._base._types import DeviceProperties, SourceLine

if TYPE_CHECKING:
    from ._reactor import Reactor

__all__ = ["QueueWatch", "log_few_queues"]

#: Passes of the watchdog in a row that find too many streams: 0.1 s.
PASSES: Final = 4

#: The most hardware queues of CUDA.
MOST_QUEUES: Final = 32

#: The variable that CUDA reads when it starts. The CUDA driver sets it then, if it is unset.
VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


class QueueWatch:
    """Counts the streams of one loop that have unfinished operations, in each pass of the watchdog.

    Streams that share a hardware queue also share the waits for other streams: a stream that waits on the device holds
    up the others. Without such waits, more streams than hardware queues cost nothing that this could measure.
    """

    __slots__ = ("_passes",)

    def __init__(self) -> None:
        self._passes = 0

    def look(self, reactor: Reactor) -> None:
        """Warn if there were too many streams in several passes in a row."""
        most = reactor.device_state.properties.hardware_queues
        if len(reactor.queues) <= most:
            self._passes = 0
            return
        queues: list[Any] = [queue for queue in reactor.queues if not queue.idle]
        if len(queues) <= most or not _some_wait(queues):
            self._passes = 0
            return
        self._passes += 1
        if self._passes == PASSES:
            opened_at = next(filter(None, (queue.rare.opened_at for queue in queues[most:])), None)
            if opened_at is not None:
                advise("hardware queues", SourceLine.parse(opened_at), _message(len(queues), most))


def _some_wait(queues: Iterable[Any]) -> bool:
    """Return whether an unfinished operation of a stream waits, on the device, for another stream."""
    return any(
        queue.unmarked_wait_at >= 0 or any(each.kind == "wait" for each in itertools.islice(queue.pending, 8))
        for queue in queues
    )


def _message(streams: int, most: int) -> str:
    setting = f", or set {VARIABLE}={MOST_QUEUES} before CUDA is first used"
    return (
        f"{streams} streams have unfinished operations, some wait for each other, and the device has {most} hardware "
        "queues: streams that share one wait for each other's work. Lend streams from "
        f"aiocuda.StreamPool(device, maximum={most}){setting * (most < MOST_QUEUES)}"
    )


def log_few_queues(properties: DeviceProperties, index: int) -> None:
    """Log that other code has started CUDA with fewer hardware queues than aiocuda would have asked for.

    Most programs never notice: `QueueWatch` warns those that do.
    """
    if properties.hardware_queues < MOST_QUEUES and VARIABLE not in os.environ:
        queues = properties.hardware_queues
        log("info", "few_hardware_queues", device=properties.name, index=index, hardware_queues=queues)
