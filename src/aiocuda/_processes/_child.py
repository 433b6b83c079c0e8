"""Child: a process that this process starts, with the socket pairs that it inherits."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import ClosedError
from ._fork_server import ForkedProcess, ProgramServer
from ._message_socket import MessageSocket
from ._messages import pipes, receive
from ._parent import InheritedFile

__all__ = ["END_SECONDS", "Child"]

#: Seconds for a process to end by itself when its sockets are closed.
END_SECONDS = 1.0

#: Held for each question for an exit code. The fork server sends it once: of two threads that ask `multiprocessing` at
#: the same time, one gets 255 instead. `Process.start` asks for the exit codes of all other processes.
_ASKING = threading.Lock()


class Child:
    """A process that this process starts, and this process's ends of the socket pairs that it inherits.

    `start`, `first_message` and `end` are for a thread, `kill` is for any thread, the other methods are for the loop.

    Parameters
    ----------
    main
        The program of the process. Its arguments are an `InheritedFile` for each pair, and ``setup``.
    setup
    name
    use
        The call of the program that starts the process, for messages: ``"start a loader"``.
    server
        Forks the process; None if it is spawned.
    pairs
        The number of socket pairs.
    daemon
        True if the process ends with the interpreter, and starts no process by `multiprocessing` itself.

    Attributes
    ----------
    pid
        None before `start`.
    """

    def __init__(
        self, main: Callable[..., None], setup: object, *, name: str, use: str,
        server: ProgramServer | None = None, pairs: int = 1, daemon: bool = False,
    ) -> None:  # fmt: skip
        with contextlib.ExitStack() as unused:  # if the last pair is one descriptor too many
            ends = [tuple(map(unused.enter_context, pipes())) for _ in range(pairs)]
            unused.pop_all()
        self._ours = [ours for ours, _ in ends]
        self._theirs = [theirs for _, theirs in ends]
        make = multiprocessing.get_context("spawn").Process if server is None else partial(ForkedProcess, server)
        files = [InheritedFile(each.fileno()) for each in self._theirs]
        self._process = make(target=main, args=(*files, setup), name=name, daemon=daemon)
        self._is_own = server is None  # else the fork server waits for the process
        self._name = name
        self._use = use
        self._lock = threading.Lock()  # of `start` and `end`: `end` may be called while a thread starts the process
        self._dropped = False
        self._exit_code: int | None = None
        self.pid: int | None = None
        self.sockets: list[MessageSocket] = []  #: this process's ends, after `connect`

    # -- a thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. **May block.**

        Raises
        ------
        ClosedError
            `kill` or `end` was called before.
        """
        with self._lock:
            try:
                if self._dropped:
                    raise ClosedError(f"{self._name} was ended before it was started")
                with _ASKING:
                    self._process.start()
                self.pid = self._process.pid
            finally:
                self._close_theirs()

    def first_message(self) -> Any:
        """Return the first message of the process: the result of its start, or its `Failure`. **May block.**

        Raises
        ------
        EOFError
            The process has ended before.
        """
        try:
            return receive(self._ours[0])[0]
        except OSError as error:
            raise EOFError(str(error)) from error

    def end(self, deadline: float | None = None) -> int | None:
        """Wait until the process has ended; kill it at the deadline. **May block.** Idempotent.

        Return its exit code; None if it was not started.
        """
        with self._lock:
            self._dropped = True
            if not self.sockets:
                self.dismiss()
            self._close_theirs()
            if self.pid is not None and self.exit_code is None:
                self._join(END_SECONDS if deadline is None else max(0.0, deadline - time.monotonic()))
                if self.exit_code is None:
                    self.kill()
                    self._join(None)
            return self.exit_code

    def _join(self, seconds: float | None) -> None:
        """Wait until the process has ended, without asking the fork server for the exit code."""
        if self._is_own:
            self._process.join(seconds)
        else:
            multiprocessing.connection.wait([self._process.sentinel], seconds)

    def _close_theirs(self) -> None:
        for each in self._theirs:
            each.close()

    # -- any thread ----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process at once. One that was not started is not started any more. Does not wait."""
        self._dropped = True
        with contextlib.suppress(ValueError, OSError, AttributeError):  # it has ended
            if self.pid is not None and not self._is_gone():
                self._process.kill()

    # -- the loop ------------------------------------------------------------------------------------------------

    def connect(self, received: Callable[[Any, memoryview], object], lost: Callable[[], object]) -> None:
        """Watch the sockets. ``received`` is called for each message, ``lost`` when the process has closed an end."""
        loop = asyncio.get_running_loop()
        self.sockets = [MessageSocket(loop, each, received, lost) for each in self._ours]

    def dismiss(self) -> None:
        """Close this process's ends, so that the process ends by itself. ``lost`` is not called any more."""
        for each in self.sockets or self._ours:
            each.close()

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs, and if it was not started. For the thread that waits for the end.

        It is unknown if the program ignores SIGCHLD, or has waited for all its children.
        """
        if self._exit_code is None and self.pid is not None:
            with _ASKING:
                self._exit_code = self._process.exitcode
            if self._exit_code is not None:
                self._process.close()  # its descriptors; else they wait for the garbage collector
        return self._exit_code

    @property
    def runs(self) -> bool:
        """True while the process runs. False when it is reaped. For the thread that waits for the end."""
        return self.pid is not None and self.exit_code is None and not self._is_gone()

    def _is_gone(self) -> bool:
        """True if the process is no child of this one any more. Another process may have its id."""
        if self._is_own and self.pid is not None:
            try:
                if sys.platform == "linux":
                    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                else:
                    os.kill(self.pid, 0)
            except (ChildProcessError, ProcessLookupError):
                return True
        return False

    @property
    def ending(self) -> str:
        """How the process has ended, for messages: ``"has ended with exit code -9 (SIGKILL)"``."""
        code = self._exit_code
        if code is None:
            return "has ended"
        name = ""
        with contextlib.suppress(ValueError):  # no signal, or a real-time one
            name = f" ({signal.Signals(-code).name})"
        return f"has ended with exit code {code}{name}"

    @property
    def early_end(self) -> str:
        """How the process has ended before its first message, for messages, with the usual reason."""
        return (
            f"{self.ending} before it was ready: its output has the reason. It imports the main module of the "
            f"program, which must not {self._use} by itself: do that below `if __name__ == '__main__':`"
        )
