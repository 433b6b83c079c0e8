"""WorkerProcess: one process that decodes samples, and this process's end of its pipe."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .._processes._failures import Failure
from .._processes._inherited_file import InheritedFile
from .._processes._message_socket import MessageSocket
from .._processes._messages import Buffer, pipes, receive
from ..errors import ClosedError, WorkerLostError
from ._worker_main import Reply, Request, WorkerSetup, main

__all__ = ["WorkerProcess", "error_of"]

#: Seconds for a process to end by itself when its pipe is closed.
END_SECONDS = 1.0


class WorkerProcess:
    """One process that decodes samples, and this process's end of its pipe.

    `start` and `end` are for a thread, the other methods for the loop. One request is on its way at a time.

    Attributes
    ----------
    pid
        None before `start`.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._pipe, self._theirs = pipes()
        self._process = _context().Process(
            target=main, args=(InheritedFile(self._theirs.fileno()), setup), name=f"aiocuda-loader-{setup.number}",
            daemon=True,
        )  # fmt: skip
        self._channel: MessageSocket | None = None
        self._lock = threading.Lock()  # of `start` and `end`: a thread may still start processes of a closed device
        self._ended = False
        self._exit_code: int | None = None
        self.pid: int | None = None

    # -- a thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. **May block.**"""
        with self._lock:
            if self._ended:
                raise ClosedError("the loader was closed before this worker process was started")
            try:
                self._process.start()
            finally:
                self._theirs.close()
            self.pid = self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the process has loaded the source and the decoder. **May block.**"""
        try:
            failure, _ = receive(self._pipe)
        except (EOFError, OSError) as error:
            exit_code = self.end()
            raise WorkerLostError(
                f"a worker process of the loader has ended with exit code {exit_code} before it was ready: its "
                "output has the reason. It imports the main module of the program, which must not start a loader by "
                "itself: start it below `if __name__ == '__main__':`",
                index=None,
                exit_code=exit_code,
            ) from error
        if failure is not None:
            self.end()
            reason = error_of(failure)
            reason.add_note("when a worker process of the loader loaded the source and decode=")
            raise reason

    def end(self, deadline: float | None = None) -> int | None:
        """Wait until the process has ended; kill it at the deadline. **May block.** Idempotent.

        Return its exit code; None if it was not started.
        """
        with self._lock:
            if self._channel is None:
                self._pipe.close()
            self._theirs.close()
            if self.pid is not None and not self._ended:
                self._process.join(END_SECONDS if deadline is None else max(0.0, deadline - time.monotonic()))
                if self._process.exitcode is None:
                    self.kill()
                    self._process.join()
                self._exit_code = self._process.exitcode
                self._process.close()  # otherwise its descriptors stay until the garbage collector finds it
            self._ended = True
            return self._exit_code

    # -- the loop ------------------------------------------------------------------------------------------------

    def connect(self, replied: Callable[[Reply, memoryview], object], lost: Callable[[], object]) -> None:
        """Watch the pipe. ``replied`` is called for each reply, ``lost`` when the process has closed its end."""
        self._channel = MessageSocket(asyncio.get_running_loop(), self._pipe, replied, lost)

    def ask(self, request: Request, buffers: Sequence[Buffer] = ()) -> None:
        """Send a request. The process has answered the last one."""
        assert self._channel is not None
        self._channel.send(request, buffers)

    def dismiss(self) -> None:
        """Close the pipe, so that the process ends after its request. ``lost`` is not called any more."""
        if self._channel is not None:
            self._channel.close()

    # -- any thread ----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process at once. Does not wait."""
        with contextlib.suppress(ValueError, OSError, AttributeError):  # it has ended, or was not started
            self._process.kill()


def error_of(failure: Failure) -> BaseException:
    """Return the exception of a worker process, with its traceback as a note."""
    error = failure.load()
    if error is None:
        error = RuntimeError(f"{failure.text} (this exception of a worker process cannot be pickled)")
    error.add_note(f"in a worker process:\n{failure.trace}")
    return error


@functools.cache
def _context() -> Any:
    """Return the start method: ``forkserver`` where there is one. It never has this library preloaded."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
