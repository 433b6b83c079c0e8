"""Extra: the state that only some operations have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .._base._failure import Failure
    from ._stream_operation import StreamOperation

__all__ = ["CopyOut", "Extra"]

#: The host's work after the device has finished. It returns False if it continues and will call
#: `StreamQueue.copied_out`.
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
