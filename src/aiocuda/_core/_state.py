"""The states of an operation. `aiocuda.completion._stream_operation` has the transitions between them."""

from __future__ import annotations

import enum

__all__ = ["ABANDONED", "DONE", "FAILED", "IN_CALL", "LANDING", "QUEUED", "STAGING", "SUBMITTED", "State"]


class State(enum.IntEnum):
    """The states of an operation. From DONE on it is finished."""

    QUEUED = 0  #: on the host, in the stream's host queue
    STAGING = 1  #: its bytes are being copied through pinned memory
    SUBMITTED = 2  #: the stream has accepted it
    LANDING = 3  #: the device has finished; the host copies the bytes out to the caller's array
    DONE = 4
    FAILED = 5
    ABANDONED = 6


# The hot path compares plain integers: each use of an IntEnum member costs an attribute look-up.
QUEUED, STAGING, SUBMITTED, LANDING, DONE, FAILED, ABANDONED = map(int, State)

#: `StreamOperation.submitted_at` during the driver call of the operation. Code that runs in that call, such as a
#: finaliser, may poll the stream: the operation is not done then, although it has no event.
IN_CALL = -1.0
