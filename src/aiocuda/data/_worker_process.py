"""WorkerProcess: one process that decodes samples, and this process's end of its pipe."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._errors import WorkerLostError
from ._messages import HEADER, Buffer, message, pipes, receive, unpacked, unpickled
from ._worker_main import Failure, InheritedFile, Reply, Request, WorkerSetup, main

__all__ = ["WorkerProcess", "error_of"]

#: Seconds for a process to end by itself when its pipe is closed.
END_SECONDS = 1.0

#: A message of this size needs no memory of its own.
SMALL = 1 << 16


class WorkerProcess:
    """One process that decodes samples, and this process's end of its pipe.

    `start` and `end` are for a thread, the other methods for the loop. One request is on its way at a time.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._pipe, self._theirs = pipes()
        self._process = _context().Process(
            target=main, args=(InheritedFile(self._theirs.fileno()), setup), name=f"aiocuda-loader-{setup.number}",
            daemon=True,
        )  # fmt: skip
        self._channel: _Channel | None = None
        self.pid: int | None = None

    # -- a thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. **May block.**"""
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
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
        """Wait until the process has ended; kill it at the deadline. **May block.** Return its exit code."""
        if self._channel is None:
            self._pipe.close()
        self._process.join(END_SECONDS if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
        exit_code: int | None = self._process.exitcode
        return exit_code

    # -- the loop ------------------------------------------------------------------------------------------------

    async def connect(self, replied: Callable[[Reply, memoryview], object], lost: Callable[[], object]) -> None:
        """Watch the pipe. ``replied`` is called for each reply, ``lost`` when the process has closed its end."""
        self._pipe.setblocking(False)
        channel = _Channel(replied, lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=self._pipe)
        self._channel = channel

    def ask(self, request: Request, buffers: Sequence[Buffer] = ()) -> None:
        """Send a request. The process has answered the last one."""
        assert self._channel is not None
        self._channel.send(message(request, buffers))

    def dismiss(self) -> None:
        """Close the pipe, so that the process ends after its request. ``lost`` is not called any more."""
        if self._channel is not None:
            self._channel.close()

    # -- any thread ----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process at once. Does not wait."""
        with contextlib.suppress(ValueError, OSError, AttributeError):  # it has ended, or was never started
            self._process.kill()


class _Channel(asyncio.BufferedProtocol):
    """The loop's side of a pipe: it receives one message at a time. Large ones go straight into their own memory."""

    def __init__(self, replied: Callable[[Reply, memoryview], object], lost: Callable[[], object]) -> None:
        self._replied: Callable[[Reply, memoryview], object] | None = replied
        self._lost: Callable[[], object] | None = lost
        self._transport: Any = None
        self._small = memoryview(bytearray(SMALL))
        self._large: memoryview | None = None  # of the message that is being received, without its header
        self._count = 0  # bytes that were received
        self._nbytes = 0  # of the pickled object

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            self._transport.write(part)

    def close(self) -> None:
        self._replied = self._lost = None
        self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return (self._small if self._large is None else self._large)[self._count :]

    def buffer_updated(self, nbytes: int) -> None:
        self._count += nbytes
        if self._large is None:
            if self._count < HEADER.size:
                return
            total, self._nbytes = HEADER.unpack_from(self._small)
            end = HEADER.size + total
            if end > SMALL:
                self._count -= HEADER.size
                self._large = memoryview(bytearray(total))
                self._large[: self._count] = self._small[HEADER.size : HEADER.size + self._count]
                return
            if self._count < end:
                return
            # The caller may keep the arrays of the message.
            body = memoryview(bytes(self._small[HEADER.size : end]))
        elif self._count < len(self._large):
            return
        else:
            body, self._large = self._large, None
        self._count = 0
        if self._replied is not None:
            self._replied(*unpacked(body, self._nbytes))

    def connection_lost(self, exc: Exception | None) -> None:
        lost, self._lost, self._replied = self._lost, None, None
        if lost is not None:
            lost()


def error_of(failure: Failure) -> BaseException:
    """Return the exception of a worker process, with its traceback as a note."""
    error: BaseException = RuntimeError(f"{failure.text} (this exception of a worker process cannot be pickled)")
    if failure.pickled is not None:
        with contextlib.suppress(Exception):
            loaded = unpickled(failure.pickled)
            if isinstance(loaded, BaseException):
                error = loaded
    error.add_note(f"in a worker process:\n{failure.trace}")
    return error


@functools.cache
def _context() -> Any:
    """Return the start method: ``forkserver`` where there is one. It never has this library preloaded."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
