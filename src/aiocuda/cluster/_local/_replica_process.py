"""ReplicaProcess: the process of a replica, and this process's ends of its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from ..._processes._inherited_file import InheritedFile
from ..._processes._messages import pipes
from ...errors import ReplicaLostError
from .._engine import unanswered
from .._messages import Create, Packet, Run, exception_of
from .._served_object import ReplicaInfo
from ._replica_main import IGNORED, Hello, PacketSocket, ReplicaSetup, main

__all__ = ["ReplicaProcess"]

#: Seconds for a process to start: it imports the main module of the program.
START_SECONDS = 60.0

#: Seconds to wait for the exit code of a process that has closed its sockets.
EXIT_CODE_SECONDS = 0.1


def _named(exit_code: int) -> str:
    """Return an exit code as text, with the name of the signal if there is one."""
    if exit_code >= 0:
        return str(exit_code)
    try:
        return f"{exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:  # a real-time signal
        return str(exit_code)


class ReplicaProcess:
    """The process of a replica, and this process's ends of its sockets.

    `launch` is for a thread, `kill` for any thread, the other methods for the loop.
    """

    def __init__(self, info: ReplicaInfo, visible: str) -> None:
        self.info = info
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as unused:  # if the second pair is one descriptor too many
            calls, their_calls = map(unused.enter_context, pipes())
            control, their_control = pipes()
            unused.pop_all()
        self._ours, self._theirs = (calls, control), (their_calls, their_control)
        files = [InheritedFile(each.fileno()) for each in self._theirs]
        setup = ReplicaSetup(info, visible, os.getpid(), *files)
        self._process: Any = multiprocessing.get_context("spawn").Process(
            target=main, args=(setup,), name=f"aiocuda-replica-{info.index}"
        )
        self._started = self._dropped = False
        self._pid = 0  # after the start
        self._exit_code: int | None = None
        self._calls: PacketSocket | None = None  # None before `connect` and after `close`
        self._control: PacketSocket | None = None
        self._lost: Callable[[str], object] | None = None
        self._hello: asyncio.Future[Packet] = self._loop.create_future()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Packet]] = {}  # for replies

    # -- a thread ------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process. **May block.** The thread must live as long as the process.

        SIGINT and SIGTERM are blocked in the thread from now on.
        """
        if self._dropped:
            return
        if sys.platform != "win32":
            resource_tracker.ensure_running()  # its start unblocks the signals
            # The process inherits the mask of this thread: Ctrl-C does not interrupt its imports.
            signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        self._process.start()
        self._pid = self._process.pid
        self._started = True

    def kill(self) -> None:
        """Send SIGKILL. Does not wait."""
        self._dropped = True
        with contextlib.suppress(ValueError, OSError, AttributeError):  # it has ended
            if self._started and not self._has_ended():
                self._process.kill()

    # -- the loop ------------------------------------------------------------------------------------------------

    async def connect(self, lost: Callable[[str], object]) -> bool | None:
        """Wait until the process answers. Return whether it has a GPU; None if it has not looked for one.

        ``lost`` is called with the reason when the process has ended by itself.
        """
        for each in self._theirs:
            each.close()
        self._lost = lost
        calls, control = self._ours
        self._calls = PacketSocket(self._loop, calls, self._receive, self._end_of_file)
        self._control = PacketSocket(self._loop, control, self._receive, self._end_of_file)
        try:
            async with asyncio.timeout(START_SECONDS):
                hello: Hello = (await self._hello).message
        except TimeoutError:
            raise self._error(f"its process has not started within {START_SECONDS:g} s") from None
        if hello.failure is not None:
            raise exception_of(hello.failure, f"replica {self.info.index}")
        return hello.has_gpu

    def call(self, request: Packet) -> asyncio.Future[Packet]:
        """Send a request, and return the future of its reply."""
        socket = self._calls if isinstance(request.message.body, Run | Create) else self._control
        if socket is None:
            return unanswered("the process of the replica has ended")
        reply: asyncio.Future[Packet] = self._loop.create_future()
        number = next(self._numbers)
        self._waiting[number] = reply
        reply.add_done_callback(functools.partial(self._forget, number))
        socket.send(number, request)
        return reply

    def _forget(self, number: int, reply: asyncio.Future[Packet]) -> None:
        self._waiting.pop(number, None)

    def _receive(self, socket: PacketSocket, number: int, reply: Packet) -> None:
        waiter = self._hello if not number else self._waiting.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _end_of_file(self) -> None:
        self._await_exit(self._loop.time() + EXIT_CODE_SECONDS)

    def _await_exit(self, deadline: float) -> None:
        """Report the loss with the exit code, which is known some milliseconds after the sockets have closed."""
        lost = self._lost
        if lost is None:
            return
        if not self._has_ended() and self._loop.time() < deadline:
            self._loop.call_later(0.01, self._await_exit, deadline)
            return
        code = self.exit_code
        reason = "its process has ended" if code is None else f"its process has ended with exit code {_named(code)}"
        if not self._hello.done():
            self._hello.set_exception(
                self._error(
                    f"{reason} before it was ready: its output has the reason. It imports the main module of the "
                    "program, which must not open a cluster by itself: open it below `if __name__ == '__main__':`"
                )
            )
        lost(reason)
        self.disconnect()

    def _error(self, reason: str) -> ReplicaLostError:
        return ReplicaLostError(
            f"replica {self.info.index} was lost: {reason}",
            replica=self.info.index,
            epoch=self.info.epoch,
            reason=reason,
        )

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs, or was not started."""
        if self._exit_code is None and self._started:
            self._exit_code = self._process.exitcode
            if self._exit_code is not None:
                self._process.close()  # its descriptors; else they wait for the garbage collector
        return self._exit_code

    def _has_ended(self) -> bool:
        if self.exit_code is not None:
            return True
        # It has no exit code if the program ignores SIGCHLD, or has waited for all its children.
        try:
            if sys.platform == "linux":  # another process may have its id
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            else:
                os.kill(self._pid, 0)
        except (ChildProcessError, ProcessLookupError):
            return True
        return False

    def disconnect(self) -> None:
        """Close the sockets, so that the process ends by itself. ``lost`` is not called any more."""
        self._lost = None
        for each in (*self._ours, *self._theirs):
            if self._calls is None:
                each.close()
        for socket in (self._calls, self._control):
            if socket is not None:
                socket.close()
        self._calls = self._control = None
        if not self._hello.done():
            self._hello.cancel()
        for waiter in tuple(self._waiting.values()):
            if not waiter.done():
                waiter.set_exception(ConnectionResetError("the process of the replica was ended"))

    async def ended(self, seconds: float | None = None) -> bool:
        """Wait until the process has ended and is reaped; False if that takes more than ``seconds``."""
        deadline = None if seconds is None else self._loop.time() + seconds
        pause = 0.001
        while self._started and not self._has_ended():
            if deadline is not None and self._loop.time() >= deadline:
                return False
            await asyncio.sleep(pause)  # waitpid: a signal handler of ours would replace the program's
            pause = min(2 * pause, 0.05)
        return True
