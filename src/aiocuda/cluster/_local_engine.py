"""LocalEngine: processes of this machine, connected by socket pairs that they inherit."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from typing import Any

import anyio

from .._base._off_loop import off_loop
from .._base._tasks import start_task
from .._processes._child import END_SECONDS, Child
from .._processes._failures import Failure
from ..errors import InvalidArgumentError, ReplicaLostError, UnsupportedError
from ._engine import VISIBLE, LostListener, unanswered
from ._messages import Create, Packet, Pickler, Run, exception_of
from ._replica_main import IGNORED, ReplicaSetup, main, packet_of, send_packet
from ._served_object import ReplicaInfo

__all__ = ["LocalEngine", "ReplicaProcess"]

#: Seconds for a process to start: it imports the main module of the program.
START_SECONDS = 60.0

#: Seconds to wait for the exit code of a process that has closed its sockets.
EXIT_CODE_SECONDS = 0.1

_CURES = f"share GPUs with {VISIBLE}=0,0 (an entry for each replica), or use the host driver with AIOCUDA_DRIVER=host"


class ReplicaProcess(Child):
    """The process of a replica. Its methods are for the loop, except `start` and `kill`."""

    def __init__(self, info: ReplicaInfo, visible: str) -> None:
        name = f"aiocuda-replica-{info.index}"
        super().__init__(main, ReplicaSetup(info, visible), name=name, use="open a cluster", pairs=2)
        self.info = info
        self._loop = asyncio.get_running_loop()
        self._lost: Callable[[str], object] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Packet]] = {}  # for replies

    def start(self) -> None:
        """Start the process. **May block.** The thread must live as long as the process.

        SIGINT and SIGTERM are blocked in the thread from now on.
        """
        if sys.platform != "win32":
            resource_tracker.ensure_running()  # its start unblocks the signals
            # The process inherits the mask of this thread: Ctrl-C does not interrupt its imports.
            signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        super().start()

    async def open(self, lost: Callable[[str], object]) -> bool | None:
        """Wait until the process answers. Return whether it has a GPU; None if it has not looked for one.

        ``lost`` is called with the reason when the process has ended by itself.
        """
        self._lost = lost
        try:
            with anyio.fail_after(START_SECONDS):
                first = await off_loop(self.first_message)
        except TimeoutError:
            raise self._error(f"its process has not started within {START_SECONDS:g} s") from None
        except EOFError:
            await self._report_end()
            raise self._error(f"its process {self.early_end}") from None
        if isinstance(first, Failure):
            raise exception_of(first, f"replica {self.info.index}")
        self.connect(self._receive, self._on_end_of_file)
        has_gpu: bool | None = first
        return has_gpu

    def call(self, request: Packet) -> asyncio.Future[Packet]:
        """Send a request, and return the future of its reply."""
        if not self.sockets or self._lost is None:
            return unanswered("the process of the replica has not started, or has ended")
        reply: asyncio.Future[Packet] = self._loop.create_future()
        number = next(self._numbers)
        self._waiting[number] = reply
        reply.add_done_callback(lambda _: self._waiting.pop(number, None))
        control, calls = self.sockets
        send_packet(calls if isinstance(request.message.body, Run | Create) else control, number, request)
        return reply

    def _receive(self, value: Any, rest: memoryview) -> None:
        number, reply = packet_of(value, rest)
        waiter = self._waiting.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _on_end_of_file(self) -> None:
        if self._reporting is None:
            self._reporting = start_task(self._report_end)

    async def _report_end(self) -> None:
        """Report the loss with the exit code, which is known some milliseconds after the sockets have closed."""
        with anyio.move_on_after(EXIT_CODE_SECONDS):
            await self._ended()
        if self._lost is not None:
            self._lost(f"its process {self.ending}")
            self.disconnect()

    def _error(self, reason: str) -> ReplicaLostError:
        index, epoch = self.info.index, self.info.epoch
        return ReplicaLostError(f"replica {index} was lost: {reason}", replica=index, epoch=epoch, reason=reason)

    def disconnect(self) -> None:
        """Close the sockets, so that the process ends by itself. ``lost`` is not called any more."""
        self._lost = None
        self.dismiss()
        if self._reporting is not None:
            self._reporting.cancel()  # it may be the running task, which returns now
        for waiter in tuple(self._waiting.values()):
            if not waiter.done():
                waiter.set_exception(ConnectionResetError("the process of the replica was ended"))

    async def stop(self, seconds: float = 0.0) -> None:
        """Close the sockets, kill the process after some seconds, and wait until it has ended. No start of it runs."""
        self.disconnect()
        self._close_theirs()
        with anyio.move_on_after(seconds):
            await self._ended()
        self.kill()
        await self._ended()

    async def _ended(self) -> None:
        """Wait until the process has ended and is reaped."""
        pause = 0.001
        while self.runs:
            await asyncio.sleep(pause)  # waitpid: a signal handler of ours would replace the program's
            pause = min(2 * pause, 0.05)


class LocalEngine:
    """Processes of this machine, connected by socket pairs that they inherit. No port is opened.

    One thread starts all processes, and lives as long as they do: the kernel kills a process when the thread that has
    started it ends (``PR_SET_PDEATHSIG``), so none outlives this process.
    """

    dumps: Pickler = staticmethod(pickle.dumps)

    def __init__(self) -> None:
        self._processes: dict[int, ReplicaProcess] = {}
        self._lost: LostListener
        self._gpus: list[str] = []
        self._have_gpu: dict[int, bool] = {}
        self._launcher = ThreadPoolExecutor(1, "aiocuda-cluster")
        self._parent = os.getpid()
        # Not the method itself: it would keep the processes of a cluster that is not closed until the interpreter ends.
        self._at_exit = functools.partial(_call, weakref.WeakMethod(self._kill_all))

    async def start(self, replicas: int, lost: LostListener) -> None:
        """Choose the GPUs of the replicas."""
        if sys.platform == "win32":
            raise UnsupportedError("the engine 'local' needs Linux or macOS: processes inherit socket pairs")
        self._gpus, self._lost = _gpus_of(replicas), lost
        atexit.register(self._at_exit)

    async def spawn(self, replica: int, epoch: int) -> None:
        """Start a process for a replica, and wait until it answers."""
        info = ReplicaInfo(replica, len(self._gpus), epoch)
        process = self._processes[replica] = ReplicaProcess(info, self._gpus[replica])
        await asyncio.get_running_loop().run_in_executor(self._launcher, process.start)
        has_gpu = await process.open(functools.partial(self._lost, replica, epoch))
        if epoch == 1 and has_gpu is not None:
            self._have_gpu[replica] = has_gpu
            _check_same(self._have_gpu)

    def call(self, replica: int, request: Packet) -> asyncio.Future[Packet]:
        """Send a request to a replica, and return the future of its reply."""
        process = self._processes.get(replica)
        return unanswered("the replica has no process") if process is None else process.call(request)

    def broadcast(self, request: Packet) -> list[asyncio.Future[Packet]]:
        """Send a request to all replicas that have a process."""
        return [process.call(request) for process in self._processes.values()]

    async def close(self, replica: int | None = None) -> None:
        """Kill the process of one replica; without an argument, end all processes. Wait until they have ended."""
        if replica is not None:
            process = self._processes.get(replica)
            if process is not None:
                process.kill()
                await process.stop()
                if self._processes.get(replica) is process:
                    del self._processes[replica]
            return
        for process in self._processes.values():
            process.disconnect()
        # A process that is being started has started then.
        await asyncio.get_running_loop().run_in_executor(self._launcher, int)
        await asyncio.gather(*(start_task(process.stop, END_SECONDS) for process in self._processes.values()))
        self._processes.clear()
        self._launcher.shutdown(wait=False)
        atexit.unregister(self._at_exit)

    def _kill_all(self) -> None:
        """Kill all processes: the interpreter ends, and `close` was not called."""
        if os.getpid() != self._parent:
            return  # a fork of the program ends
        for process in tuple(self._processes.values()):
            process.kill()


def _call(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = reference()
    if method is not None:
        method()


def _gpus_of(replicas: int) -> list[str]:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` for each replica.

    Raises
    ------
    InvalidArgumentError
        The variable is set, and has fewer entries than there are replicas.
    """
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return [str(index) for index in range(replicas)]
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if not entries:
        return [""] * replicas  # all GPUs are hidden: the host driver
    if len(entries) < replicas:
        raise InvalidArgumentError(
            f"replicas={replicas}, but {VISIBLE}={visible} names {len(entries)}: use fewer replicas, or {_CURES}",
            argument="replicas",
        )
    return entries[:replicas]


def _check_same(have_gpu: dict[int, bool]) -> None:
    """Raise `InvalidArgumentError` if some replicas have a GPU and others do not. Keys are the replicas' indices."""
    without = [index for index, has in have_gpu.items() if not has]
    if without and len(without) < len(have_gpu):
        raise InvalidArgumentError(
            f"replica {without[0]} has no GPU, and others have one: use fewer replicas, or {_CURES}",
            argument="replicas",
        )
