"""WorkerProcess: one process that decodes samples, and this process's end of its pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from .._processes._child import END_SECONDS, Child
from .._processes._failures import Failure
from .._processes._messages import Buffer
from ..errors import WorkerLostError
from ._worker_main import Request, WorkerSetup, main

__all__ = ["END_SECONDS", "WorkerProcess", "error_of"]


class WorkerProcess(Child):
    """One process that decodes samples, and this process's end of its pipe.

    One request is on its way at a time. `connect` is called with a function that takes a `Reply`.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        # The fork server, where there is one. It never has this library preloaded.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        name = f"aiocuda-loader-{setup.number}"
        super().__init__(main, setup, name=name, use="start a loader", method=method, daemon=True)

    def wait_until_ready(self) -> None:
        """Wait until the process has loaded the source and the decoder. **May block.**"""
        try:
            failure = self.first_message()
        except EOFError as error:
            exit_code = self.end()
            text = f"a worker process of the loader {self.early_end}"
            raise WorkerLostError(text, index=None, exit_code=exit_code) from error
        if failure is not None:
            self.end()
            reason = error_of(failure)
            reason.add_note("when a worker process of the loader loaded the source and decode=")
            raise reason

    def ask(self, request: Request, buffers: Sequence[Buffer] = ()) -> None:
        """Send a request. The process has answered the last one."""
        self.sockets[0].send(request, buffers)


def error_of(failure: Failure) -> BaseException:
    """Return the exception of a worker process, with its traceback as a note."""
    error = failure.load()
    if error is None:
        error = RuntimeError(f"{failure.text} (this exception of a worker process cannot be pickled)")
    error.add_note(f"in a worker process:\n{failure.trace}")
    return error
