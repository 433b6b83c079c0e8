"""What both forms of the core share: the states of an operation, the obstacles of a ring, and `Extra`.

`aiocuda.completion._progress` has the transitions between the states. Obstacles are the bits of `Ring.obstacles`:
why a new operation cannot take the short way.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .._base._failure import Failure
    from ._stream_operation import StreamOperation

__all__ = [
    "ABANDONED", "BARRED", "CLOSED", "COMPLICATED", "DONE", "ENDED", "FAILED", "FAULTED", "INACTIVE", "IN_CALL",
    "LANDING", "POISONED", "QUEUED", "RECORDED", "REFUSING", "SHARED", "STAGING", "SUBMITTED", "UNASKED", "CopyOut",
    "Extra", "State",
]  # fmt: skip


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

#: The bits of `Ring.obstacles`. CLOSED, SHARED, RECORDED and ENDED: see these attributes of `Ring`. POISONED: new
#: operations are skipped, because of a failure that no caller has received. INACTIVE: the queue was idle, so the
#: reactor does not watch it: the next operation activates it. FAULTED: the device has faulted.
CLOSED, SHARED, RECORDED, POISONED, INACTIVE, FAULTED, ENDED = (1 << number for number in range(7))

#: The bits with which a queue may refuse a new operation; SHARED only while another library captures the stream.
REFUSING = CLOSED | SHARED | RECORDED

#: The bits with which a queue takes no part in a `BoundJoin`.
BARRED = CLOSED | SHARED | RECORDED | POISONED | FAULTED

#: The bits with which a device-side wait of the queue, or for it, is more than a wait for one event.
COMPLICATED = SHARED | RECORDED | POISONED

#: The bits with which the driver is not queried for a program that calls `Operation.done`: see `Ring.glance`.
UNASKED = CLOSED | RECORDED | FAULTED

#: Begins the host's work after the device has finished with an operation, such as the copy into the caller's array.
#: It returns True if that is done, False if it continues on a thread and will call `StreamQueue.copied_out`.
CopyOut: TypeAlias = "Callable[[StreamOperation[Any]], bool]"


class Extra:
    """The state that only some operations have.

    Each attribute that a plain operation, such as a launch, does not have makes it 60 ns faster to create and resolve.

    Attributes
    ----------
    copy_out : callable or None
        The host's work after the device has finished.
    failure : Failure or None
        The failure that the operation takes in its turn, or has taken.
    detached : bool
        True while the operation is abandoned and the device may still use its memory.
    on_await : tuple of callable
        Called once with the operation, in its context, when a task awaits it after it has finished.
    on_settled : callable or None
        Called without arguments when the device has finished with the operation, whether it succeeded or not.
    """

    # Defaults of the class: an object is made without a call in Python, and only what it has is set.
    copy_out: CopyOut | None = None
    failure: Failure | None = None
    detached = False
    on_await: tuple[Callable[[StreamOperation[Any]], object], ...] = ()
    on_settled: Callable[[], object] | None = None
