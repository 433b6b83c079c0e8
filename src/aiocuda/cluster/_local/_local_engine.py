"""LocalEngine: processes of this machine, connected by socket pairs that they inherit."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...errors import InvalidArgumentError, UnsupportedError
from .._engine import VISIBLE, LostListener, unanswered
from .._messages import Packet, Pickler
from .._served_object import ReplicaInfo
from ._replica_process import ReplicaProcess

__all__ = ["LocalEngine"]

#: Seconds in which a process ends by itself after its sockets were closed.
END_SECONDS = 1.0

_CURES = f"share GPUs with {VISIBLE}=0,0 (an entry for each replica), or use the host driver with AIOCUDA_DRIVER=host"


class LocalEngine:
    """Processes of this machine, connected by socket pairs that they inherit. No port is opened.

    One thread starts all processes, and lives as long as they do: the kernel kills a process when the thread that has
    started it ends (``PR_SET_PDEATHSIG``), so none outlives this process.
    """

    dumps: Pickler = staticmethod(pickle.dumps)

    def __init__(self) -> None:
        self._processes: dict[int, ReplicaProcess] = {}
        self._listeners: list[LostListener] = []
        self._gpus: list[str] = []
        self._have_gpu: dict[int, bool] = {}
        self._launcher = ThreadPoolExecutor(1, "aiocuda-cluster")
        self._parent = os.getpid()
        # Not the method itself: it would keep the processes of a cluster that is not closed until the interpreter ends.
        self._at_exit = functools.partial(_call, weakref.WeakMethod(self._kill_all))

    async def start(self, replicas: int) -> None:
        """Choose the GPUs of the replicas."""
        if sys.platform == "win32":
            raise UnsupportedError("the engine 'local' needs Linux or macOS: processes inherit socket pairs")
        self._gpus = _gpus_of(replicas)
        atexit.register(self._at_exit)

    async def spawn(self, replica: int, epoch: int) -> None:
        """Start a process for a replica, and wait until it answers."""
        info = ReplicaInfo(replica, len(self._gpus), epoch)
        process = self._processes[replica] = ReplicaProcess(info, self._gpus[replica])
        await asyncio.get_running_loop().run_in_executor(self._launcher, process.launch)
        has_gpu = await process.connect(self._reporter(replica, epoch))
        if epoch == 1 and has_gpu is not None:
            self._have_gpu[replica] = has_gpu
            _check_same(self._have_gpu)

    def _reporter(self, replica: int, epoch: int) -> Callable[[str], None]:
        def report(reason: str) -> None:
            for listener in self._listeners:
                listener(replica, epoch, reason)

        return report

    def call(self, replica: int, request: Packet) -> asyncio.Future[Packet]:
        """Send a request to a replica, and return the future of its reply."""
        process = self._processes.get(replica)
        return unanswered("the replica has no process") if process is None else process.call(request)

    def broadcast(self, request: Packet) -> list[asyncio.Future[Packet]]:
        """Send a request to all replicas that have a process."""
        return [process.call(request) for process in self._processes.values()]

    def on_lost(self, listener: LostListener) -> None:
        """Call a function when the process of a replica has ended by itself."""
        self._listeners.append(listener)

    async def close(self, replica: int | None = None) -> None:
        """Kill the process of one replica; without an argument, end all processes. Wait until they have ended."""
        if replica is not None:
            process = self._processes.get(replica)
            if process is not None:
                process.disconnect()
                process.kill()
                await process.ended()
                if self._processes.get(replica) is process:
                    del self._processes[replica]
            return
        for process in self._processes.values():
            process.disconnect()
        # A process that is being started has started then.
        await asyncio.get_running_loop().run_in_executor(self._launcher, int)
        processes = list(self._processes.values())
        await asyncio.gather(*(process.ended(END_SECONDS) for process in processes))
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.ended() for process in processes))
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
