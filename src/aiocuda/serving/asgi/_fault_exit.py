"""FaultExit: ends the process of a server after a device fault, with an exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from typing import Any, Self

from ..._fault_watch import FaultWatch
from ..._faults import FAULTS
from ..._log import log
from ..._open_devices import OPEN_DEVICES
from ...errors import DeviceFault

__all__ = ["FaultExit"]


class FaultExit:
    """A block around the time in which a server serves. After a device fault the process ends with an exit code.

    The end has two parts. First, SIGTERM asks the server to end in its usual way: it stops listening, waits for the
    running requests, and leaves the lifespan. SIGINT would be wrong: if uvicorn is ending already, a SIGINT makes it
    drop the running requests.

    Second, the exit code. When uvicorn has ended, it restores the handlers that it has found, and raises the signal
    again, so that the process dies by SIGTERM (status 143) before any code here could run. So from the end of the
    lifespan on, SIGTERM is blocked in the main thread, and a callback leaves the event loop by `SystemExit`, as a task
    may do in asyncio. The callback belongs to the end of the lifespan's task, so the lifespans around this one are left
    in the usual way. `SystemExit` goes through ``asyncio.run``, which cancels the tasks that are left, through the
    server, and in a worker process through multiprocessing, which makes it the exit code of the process.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._earlier: DeviceFault | None = None  # before the server has begun to serve
        self._serving = False
        self._asked = False

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watch = FaultWatch(self._loop, self._ask_server)
        return self

    def serve(self) -> None:
        """Note that the server begins to serve. If a device has faulted before, the server ends soon."""
        self._serving = True
        self._earlier = FAULTS.of_process or OPEN_DEVICES.fault()
        if self._fault is not None:
            self._loop.call_soon(self._ask_server)

    def __exit__(self, *exc: object) -> None:
        self._watch.stop()
        if not self._serving:
            return  # the setup has failed: the server ends by itself, with its own exit code
        self._serving = False
        task = asyncio.current_task()
        if self._fault is not None and task is not None and _handles_sigterm():
            if sys.platform != "win32":  # there the server's own exit code stays
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            task.add_done_callback(self._leave_loop)

    @property
    def _fault(self) -> DeviceFault | None:
        return self._watch.fault or self._earlier

    def _ask_server(self) -> None:
        """Ask the server to end."""
        if not self._serving or self._asked:
            return
        self._asked = True
        if not _handles_sigterm():
            self._loop.call_exception_handler(
                {
                    "message": f"aiocuda: a device has faulted, and exit_on_fault={self._code} cannot end the process: "
                    "the server has no handler for SIGTERM, or does not run in the main thread. Let a liveness probe "
                    "of `health` end it",
                    "exception": self._fault,
                }
            )
            return
        log("error", "process_ends", exit_code=self._code, fault=str(self._fault))
        signal.raise_signal(signal.SIGTERM)  # `os.kill` ends a process on Windows immediately

    def _leave_loop(self, task: asyncio.Task[Any]) -> None:
        raise SystemExit(self._code)


def _handles_sigterm() -> bool:
    """Return whether SIGTERM calls a function in this thread. Without one it would kill the process immediately."""
    return threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGTERM))
