"""Errors of data loaders."""

from __future__ import annotations

from ..errors import AiocudaError

__all__ = ["WorkerLostError"]


class WorkerLostError(AiocudaError, RuntimeError):
    """A worker process of a data loader has ended, and the loader may start no more processes in its place.

    The sample may have made it end: a decoder that crashes or takes too much memory. ``restarts=`` of the loader is the
    number of processes that it starts in place of lost ones.
    """

    index: int | None  #: the index of the sample that the process was decoding; None if it was decoding none
    exit_code: int | None  #: the exit code of the process; negative for a signal, None if unknown
