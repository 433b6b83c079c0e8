"""The messages between a cluster and its replicas. Each request has one reply."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._processes._failures import Failure
from .._processes._messages import PROTOCOL, Buffer
from ..errors import AiocudaError

__all__ = [
    "ANY_EPOCH", "Body", "Cancel", "Create", "Destroy", "Leave", "Packet", "Pickler", "Probe", "RemoteError", "Reply",
    "Request", "Run", "Watch", "exception_of", "pack", "pack_own",
]  # fmt: skip

#: The epoch of a request to all replicas, which each of them answers.
ANY_EPOCH = 0

#: Pickles a value and passes its large buffers to a callback: the signature of `pickle.dumps`.
Pickler: TypeAlias = Callable[..., bytes]


class Create(NamedTuple):
    """Create an object: call its class, and enter it. A second request for the same number awaits the first."""

    number: int
    program: bytes  #: the class and its arguments, pickled


class Run(NamedTuple):
    """Run a method."""

    id: int  #: counts the calls to this replica in this epoch
    number: int  #: of the object
    method: str
    arguments: bytes  #: pickled; their large buffers are those of the packet


class Cancel(NamedTuple):
    """Cancel methods, or refuse those that arrive later than this message."""

    ids: tuple[int, ...]


class Destroy(NamedTuple):
    """Leave an object."""

    number: int


class Probe(NamedTuple):
    """Ask whether the loop and the devices of the replica answer."""


class Watch(NamedTuple):
    """Wait for a device fault. The reply is its failure."""


class Leave(NamedTuple):
    """Cancel all methods and leave all objects: the cluster is being closed."""


Body: TypeAlias = Create | Run | Cancel | Destroy | Probe | Watch | Leave


class Request(NamedTuple):
    """A message to a replica."""

    epoch: int
    body: Body
    settled: tuple[int, ...] = ()  #: ids of calls whose reply has arrived, or is not waited for any more


class Reply(NamedTuple):
    """The answer to a request."""

    epoch: int
    result: bytes | None = None  #: pickled; its large buffers are those of the packet
    failure: Failure | None = None
    fault: bool = False  #: a device of the replica has faulted
    seconds: float = 0.0  #: the time that a method took
    accepted: bool = True  #: False for a call of another epoch, and for one that was cancelled before it arrived


class Packet(NamedTuple):
    """A message, and the large buffers of its pickled part."""

    message: Any  #: a `Request` or a `Reply`
    buffers: Sequence[memoryview] = ()

    def load(self, data: bytes) -> Any:
        """Return the value of the pickled part. Its arrays refer to the buffers."""
        return pickle.loads(data, buffers=self.buffers)


def pack(value: Any, dumps: Pickler = pickle.dumps) -> tuple[bytes, list[memoryview]]:
    """Return a pickled value without the bytes of its large arrays, and these."""
    buffers: list[Buffer] = []
    data = dumps(value, protocol=PROTOCOL, buffer_callback=buffers.append)
    return data, [buffer.raw() for buffer in buffers]


def pack_own(values: list[Any], dumps: Pickler = pickle.dumps) -> tuple[bytes, list[memoryview]]:
    """Take the last value of a list, and return it like `pack`, in memory that no code of the program writes to.

    A large buffer is copied, unless it cannot change, or is the array's own and the array has no other user. The value
    is in a list so that the caller does not count as a user.
    """
    buffers: list[Buffer] = []
    data = dumps(values.pop(), protocol=PROTOCOL, buffer_callback=buffers.append)
    return data, [buffer.raw() if _is_alone(buffer) else memoryview(bytearray(buffer.raw())) for buffer in buffers]


def _is_alone(buffer: Buffer) -> bool:
    """True if nothing can write to a buffer."""
    with memoryview(buffer) as view:
        if isinstance(view.obj, bytes):
            return True
        own = isinstance(view.obj, np.ndarray) and view.obj.flags.owndata
    return own and _references(buffer) == _ALONE


def _references(buffer: Buffer) -> int:
    """Return the number of references to the object of a buffer. This function has some of them."""
    with memoryview(buffer) as view:
        return sys.getrefcount(view.obj)


#: `_references` of an array that has no other user. Versions of Python count differently.
_ALONE = _references(Buffer(np.empty(1)))  # type: ignore[arg-type]


class RemoteError(AiocudaError, RuntimeError):
    """A method of a replica raised an exception that cannot be sent to this process, or returned such a result.

    An exception is not sent if it cannot be pickled, or if it is no `Exception`: a `SystemExit` of a replica does not
    end the caller.
    """

    __module__ = "aiocuda.cluster"  # the public name, for tracebacks and logs

    type_name: str  #: name of the exception's class
    text: str  #: its type and message
    traceback: str  #: its traceback in the replica


def exception_of(failure: Failure, where: str) -> Exception:
    """Return the exception of a replica, with its traceback there as a note."""
    note = f"in {where}:\n{failure.trace}"
    error = failure.load()
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):  # its class refuses attributes, as a frozen dataclass does
            error.add_note(note)
        return error
    kind = failure.text.partition(":")[0]
    remote = RemoteError(f"{where} raised {failure.text}", type_name=kind, text=failure.text, traceback=failure.trace)
    remote.add_note(note)
    return remote
