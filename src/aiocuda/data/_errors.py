"""Errors of data loaders."""

from __future__ import annotations

from ..errors import AiocudaError

__all__ = ["WorkerLostError", "fatal_sample", "no_restart_left", "too_many_fatal_samples"]

_LOOK = "look for the reason in its output; exit code -9 is often the system's answer to too little memory"


class WorkerLostError(AiocudaError, RuntimeError):
    """A worker process of a data loader has ended, and the loader may start no more processes in its place.

    The sample may have made it end: a decoder that crashes or takes too much memory. ``restarts=`` of the loader is the
    number of processes that it starts in place of lost ones.

    A function ``on_error=`` gets this error for a sample that has ended two processes, and is skipped.
    """

    index: int | None  #: the index of the sample that the process was decoding; None if it was decoding none
    exit_code: int | None  #: the exit code of the process; negative for a signal, None if unknown


def no_restart_left(how: str, index: int | None, exit_code: int | None, cure: str = _LOOK) -> WorkerLostError:
    """Return the error for a process that has ended and may not be replaced."""
    return WorkerLostError(
        f"a worker process of the loader {how}, and restarts= allows no more processes in its place: {cure}",
        index=index,
        exit_code=exit_code,
    )


def fatal_sample(index: int, tries: int, exit_code: int | None) -> WorkerLostError:
    """Return the failure of a sample that has ended so many processes, the last one with this exit code."""
    return WorkerLostError(
        f"sample {index} has ended {tries} worker processes of the loader, the last one with exit code {exit_code}: "
        f"{_LOOK}",
        index=index,
        exit_code=exit_code,
    )


def too_many_fatal_samples(error: WorkerLostError, most: int) -> WorkerLostError:
    """Return the error for one more such sample than an epoch skips. Its own failure is the cause."""
    failure = WorkerLostError(
        f"{error}. {most} samples of this epoch have done that before and were skipped, and no more are: repair "
        "decode= or the source, or use a machine with more memory",
        index=error.index,
        exit_code=error.exit_code,
    )
    failure.__cause__ = error
    return failure
