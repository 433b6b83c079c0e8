"""The part of a `Child` that runs in its process: its ends of socket pairs, its first message, its parent's end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from multiprocessing import connection, parent_process, reduction
from typing import Any, NoReturn, Self

from ._failures import failure_from
from ._messages import Pipe, pipe_of, send

__all__ = ["InheritedFile", "Start", "end_with_parent", "own_end"]

_PR_SET_PDEATHSIG = 1  # of sys/prctl.h


class InheritedFile:
    """A file descriptor that a process inherits when it is started. In the process, ``fd`` is its own descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        if sys.platform == "win32":  # there, a descriptor is not inherited
            raise NotImplementedError
        return _inherited, (reduction.DupFd(self.fd),)


def _inherited(duplicate: Any) -> InheritedFile:
    return InheritedFile(duplicate.detach())


def own_end(file: InheritedFile) -> Pipe:
    """Return this process's end of a socket pair.

    Programs that this process starts, and its forks, do not keep it open: else they would hide the end of the process.
    """
    if sys.platform == "win32":  # there, a socket pair is not inherited
        raise NotImplementedError
    os.set_inheritable(file.fd, False)
    pipe = pipe_of(file.fd)
    os.register_at_fork(after_in_child=pipe.close)
    return pipe


class Start:
    """A block that prepares a process. At its end the parent gets the first message: the result of the start.

    If the block fails, the message is its `Failure`, and the process ends.
    """

    result: Any = None

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(OSError):  # the parent has closed its end
            send(self._pipe, self.result if error is None else failure_from(error), [])
        if error is not None:
            raise SystemExit from None


def end_with_parent(*, at_once: bool = False) -> None:
    """Let this process end when its parent has ended.

    A thread ends it. With ``at_once``, the kernel kills it when the thread that has started it ends, also if this
    process is stopped or holds the GIL. Not for a process of a fork server.
    """
    parent = parent_process()
    if parent is None:
        return
    if at_once and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent.pid:  # it has ended before the call
            os._exit(1)
    threading.Thread(target=_wait, args=(parent.sentinel,), name="aiocuda-parent-watch", daemon=True).start()


def _wait(sentinel: int) -> NoReturn:
    connection.wait([sentinel])
    os._exit(1)  # code of the program may be running, and nothing waits for it
