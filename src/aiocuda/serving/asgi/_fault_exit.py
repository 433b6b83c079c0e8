"""FaultExit: ends the process of a server after a device fault, with an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import weakref
from typing import Any, Final, Self

from ..._base._fault_watch import FaultWatch
from ..._base._faults import FAULTS
from ..._base._log import log
from ...errors import DeviceFault
from ...lowlevel import OPEN_DEVICES

__all__ = ["FaultExit"]

#: Seconds after the end of the lifespan in which the server has to end by itself. Then its tasks are cancelled.
_SERVER_SECONDS: Final = 1.0

#: Seconds after the end of the lifespan in which the process has to end. Then it is ended from a thread.
_PROCESS_SECONDS: Final = 10.0


class FaultExit:
    """A block around the time in which a server serves. After a device fault the process ends with an exit code.

    The end has three parts. First, SIGTERM asks the server to end in its usual way: it stops listening, waits for the
    running requests, and leaves the lifespan. SIGINT would be wrong: if uvicorn is ending already, a SIGINT makes it
    drop the running requests.

    Second, the exit code. When uvicorn has ended, it restores the handlers that it has found, and raises the signal
    again, so that the process dies by SIGTERM (status 143) before any code here could run. So from the end of the
    lifespan on, SIGTERM is blocked in the main thread, and a callback leaves the event loop by `SystemExit`, as a task
    may do in asyncio. `SystemExit` goes through ``asyncio.run``, which ends the threads of ``asyncio.to_thread``,
    through the server, and in a worker process through multiprocessing, which makes it the exit code of the process.

    The callback runs when all tasks that are older than the lifespan have ended. One of them is the server's main task,
    and its own callback stops the loop. `SystemExit` before that callback would leave it in the loop's queue. There it
    would stop the loop once more, while ``asyncio.run`` closes it: that fails, with exit code 1. Tasks that do not end
    are cancelled, as ``asyncio.run`` would do.

    Third, a limit. A thread that never ends, such as one that waits for the device, would hold ``asyncio.run``, or the
    interpreter at its exit, forever. Python cannot leave such a thread but by ``os._exit``.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._earlier: DeviceFault | None = None  # before the server has begun to serve
        self._serving = False
        self._asked = False
        self._running: set[asyncio.Task[Any]] = set()  # of `_older`, at the end of the lifespan

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._older = weakref.WeakSet(asyncio.all_tasks())  # and the task of the lifespan
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
            task.add_done_callback(self._limit_end)  # not before: lifespans around this one are left in the usual way
            self._running = {task, *(each for each in self._older if not each.done())}
            for each in self._running:
                each.add_done_callback(self._task_ended)

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

    def _limit_end(self, task: asyncio.Task[Any]) -> None:
        """Limit the time of the server, and that of the process. The lifespan has ended."""
        self._loop.call_later(_SERVER_SECONDS, self._cancel_tasks)
        limit = threading.Timer(_PROCESS_SECONDS, _end_process, (self._code,))
        limit.name, limit.daemon = "aiocuda-exit", True
        limit.start()

    def _cancel_tasks(self) -> None:
        for task in self._running:
            task.cancel()

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """Leave the loop after the last task. The callback that stops the loop is older, so it has run."""
        self._running.discard(task)
        if self._running:
            return
        if isinstance(self._loop, asyncio.BaseEventLoop):
            self._leave_loop()
        else:  # `stop` of uvloop enqueues one more callback
            self._loop.call_soon(self._leave_loop)

    def _leave_loop(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a thread that does not block it may get that of a supervisor
        raise SystemExit(self._code)


def _handles_sigterm() -> bool:
    """Return whether SIGTERM calls a function in this thread. Without one it would kill the process immediately."""
    return threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGTERM))


def _end_process(code: int) -> None:
    """End the process, which has had its time. This runs in a thread of its own: any other one may be stuck."""
    try:  # in one more thread, since a stuck one may hold the lock of a log handler or of a stream
        writer = threading.Thread(target=_write_last, args=(code,), daemon=True)
        writer.start()
        writer.join(1.0)
    finally:
        # `SystemExit` would end this thread alone. The functions of `atexit` do not run: they belong to the main
        # thread, which has not come so far, or is in one of them.
        os._exit(code)


def _write_last(code: int) -> None:
    """Log the end, and write what the interpreter's exit would write."""
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    log("error", "process_end_forced", exit_code=code, seconds=_PROCESS_SECONDS, threads=", ".join(threads))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
