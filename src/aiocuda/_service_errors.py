"""Errors of requests to a micro-batcher and of calls to a cluster, which a web service answers."""

from __future__ import annotations

from .errors import AiocudaError

__all__ = ["DeadlineError", "ReplicaLostError"]


class DeadlineError(AiocudaError, TimeoutError):
    """The deadline has passed, or the request was refused because it would miss it.

    A `MicroBatcher` does not pass a request to its function if it was refused, or expired before its batch began.
    """

    deadline_s: float  #: seconds from the call, as requested
    predicted_s: float | None  #: the predicted time of a request that was refused; None for one that has expired


class ReplicaLostError(AiocudaError, RuntimeError):
    """The replica was lost while it ran this call, or no replica is left.

    The method may have run in whole, in part or not at all. ``__cause__`` is the `DeviceFault` that ended the replica,
    if there is one. If the method may run twice, use ``call(…, retry=True)``.
    """

    replica: int | None  #: index of the replica; None if there is none to run the call
    epoch: int | None  #: the epoch that was lost
    reason: str  #: why it was lost
