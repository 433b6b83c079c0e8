"""The errors of `aiocuda.cluster`."""

from __future__ import annotations

import contextlib

from .._processes._failures import Failure
from ..errors import AiocudaError, DeadlineError, ReplicaLostError

__all__ = ["DeadlineError", "RemoteError", "ReplicaLostError", "exception_of"]


class RemoteError(AiocudaError, RuntimeError):
    """A method of a replica raised an exception that cannot be sent to this process, or returned such a result.

    An exception is not sent if it cannot be pickled, or if it is no `Exception`: a `SystemExit` of a replica does not
    end the caller.
    """

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
