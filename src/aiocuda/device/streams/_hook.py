"""StreamHook: code that runs in place of a stream's methods, and decides whether and when to call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..._core import Operation, StreamOperation

if TYPE_CHECKING:
    from ._stream import Stream

__all__ = ["RecordedOperation", "StreamHook"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class StreamHook(Protocol):
    """Runs in place of the methods that give a stream work, or hand it to other code.

    `Stream` has the only call of each method's hook: a new kind of stream needs a hook, and overrides no method. A
    stream without a hook pays one comparison with None per method, and no Python call. The methods are those of the
    table `METHODS`. Hooks read there what they have to know about each.
    """

    def call(self, method: str, proceed: Callable[..., T], *args: Any) -> T:
        """Return what the stream's method returns. ``proceed(*args)`` does what it does on a stream without a hook.

        The arguments are in the order of the method's signature, defaults included. Those of ``launch`` are the kernel,
        grid, block, a tuple of the kernel's arguments, and the bytes of shared memory; those of ``submit`` the
        function, a tuple of its arguments, and a dict of its keyword arguments.
        """


class RecordedOperation(StreamOperation[T_co]):
    """An operation that a hook has recorded: its stream has not enqueued it."""

    __slots__ = ()

    def joined_by(self, stream: Stream) -> Operation[None]:
        """Record that later work of this stream waits for the operation. Called by `Stream.wait`."""
        raise NotImplementedError
