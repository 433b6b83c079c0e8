"""DeadlineError, of requests to a micro-batcher and of calls to a cluster."""

from __future__ import annotations

from .errors import AiocudaError

__all__ = ["DeadlineError"]


class DeadlineError(AiocudaError, TimeoutError):
    """The deadline has passed, or the request was refused because it would miss it.

    A `MicroBatcher` does not pass a request to its function if it was refused, or expired before its batch began.
    """

    deadline_s: float  #: seconds from the call, as requested
    predicted_s: float | None  #: the predicted time of a request that was refused; None for one that has expired
