"""StreamHook: code that runs in place of a stream's methods, and decides whether and when to call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..completion._operation import Operation
from ..completion._stream_queue import StreamOperation

__all__ = ["RecordedOperation", "StreamHook"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class StreamHook(Protocol):
    """Runs in place of the methods that give a stream work, or hand it to other code.

    `Stream` has the only call of each method's hook: a new kind of stream needs a hook, and overrides no method. A
    stream without a hook pays one comparison with None per method, and no Python call. The methods are ``empty``,
    ``upload``, ``copy``, ``download``, ``fill``, ``prefetch``, ``launch``, ``record``, ``wait``, ``synchronize``,
    ``add_callback``, ``capture``, ``lend``, ``__cuda_stream__``, ``aclose``, and ``end``: another stream waits for all
    work of this one.
    """

    def call(self, method: str, proceed: Callable[..., T], *args: Any) -> T:
        """Return what the stream's method returns.

        Parameters
        ----------
        method
            The name of the method.
        proceed
            ``proceed(*args)`` does what the method does on a stream without a hook.
        *args
            The method's arguments, in the order of its signature, defaults included. Those of ``launch`` are the
            kernel, grid, block, a tuple of the kernel's arguments, and the bytes of shared memory.
        """


class RecordedOperation(StreamOperation[T_co]):
    """An operation that a hook has recorded: its stream has not enqueued it."""

    __slots__ = ()

    def joined_by(self, stream: Any) -> Operation[None]:
        """Record that later work of this stream waits for the operation. Called by `Stream.wait`."""
        raise NotImplementedError
