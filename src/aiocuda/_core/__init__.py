"""The core: operations and the queue of a stream, compiled or in Python. See its README.md in the repository."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._state import (
    ABANDONED,
    BARRED,
    CLOSED,
    COMPLICATED,
    DONE,
    ENDED,
    FAILED,
    FAULTED,
    IN_CALL,
    INACTIVE,
    LANDING,
    POISONED,
    QUEUED,
    RECORDED,
    REFUSING,
    SHARED,
    STAGING,
    SUBMITTED,
    CopyOut,
    Extra,
    State,
)

if TYPE_CHECKING:
    from ._blocks import BlockFields, LiveBlocks
    from ._bound_call import BoundCall, BoundCopy, BoundJoin, BoundLaunch, Chain
    from ._enqueuing_stream import EnqueuingStream, NewestLaunch
    from ._estimate import INSTANT, Estimate, Outlook
    from ._gather import Gathering, gather
    from ._hot import Countdown, DeviceHot, Lease, ReactorHot, Turn, Watch
    from ._native import Native
    from ._operation import INTERNAL, HasOperation, Operation
    from ._ring import Obstacle, Ring, new_id, new_operation, nothing
    from ._stream_operation import StreamOperation, stream_operation
    from ._stream_operation import Waiter as Waiter
else:

    def __getattr__(name: str) -> object:
        """Import the core, in the form that the process uses, at the first use of one of its names."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ._form import form

        names = globals()
        for module in form().modules:
            names |= {each: value for each, value in vars(module).items() if each in __all__}
        return names[name]


__all__ = [
    "ABANDONED", "BARRED", "CLOSED", "COMPLICATED", "DONE", "ENDED", "FAILED", "FAULTED", "INACTIVE", "INSTANT",
    "INTERNAL", "IN_CALL", "LANDING", "POISONED", "QUEUED", "RECORDED", "REFUSING", "SHARED", "STAGING",
    "SUBMITTED", "BlockFields", "BoundCall", "BoundCopy", "BoundJoin", "BoundLaunch", "Chain", "CopyOut",
    "Countdown", "DeviceHot", "EnqueuingStream", "Estimate", "Extra", "Gathering", "HasOperation", "Lease",
    "LiveBlocks", "Native", "NewestLaunch", "Obstacle", "Operation", "Outlook", "ReactorHot", "Ring", "State",
    "StreamOperation", "Turn", "Watch", "gather", "new_id", "new_operation", "nothing", "stream_operation",
]  # fmt: skip
