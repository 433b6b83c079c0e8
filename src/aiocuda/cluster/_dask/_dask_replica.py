"""DaskReplica: the actor of a replica on a worker, as the client sees it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import distributed
from distributed.protocol.serialize import Serialize

from ..._base._log import log
from ..._base._tasks import start_task
from ..._processes._failures import text_of
from .._engine import unanswered
from .._messages import Create, Leave, Packet, Run
from .._served_object import ReplicaInfo
from ._replica_actor import Frames, ReplicaActor, ReplicaLease, frames_of, kill_process, packet_of

__all__ = ["DaskReplica", "DaskWorker"]

#: The most calls that Dask carries at once to one replica, and to all. Each has a connection of its own, and the pools
#: of a client and a scheduler have 512: probes must not wait for one.
MOST_CALLS, MOST_CALLS_OF_ALL = 128, 384

#: Seconds for the calls of a replica to end after it was left, or its worker was killed.
END_SECONDS = 2.0

#: Seconds for a nanny to kill its worker.
KILL_SECONDS = 10.0


class DaskWorker(NamedTuple):
    """A process of a worker. Its nanny starts another one, with another directory, when it has ended."""

    address: str
    nanny: str  #: the address of its nanny, which is the same for the next process; empty without a nanny
    host: str
    directory: str  #: is unique: an address may be that of an earlier process


class DaskReplica:
    """The actor of a replica on a worker, as the client sees it.

    It sends the message that `distributed.Actor` sends. Each call of an `Actor` makes a reference cycle with its
    arguments, which keeps large arrays until a garbage collection. Its future may never end when the worker is lost.

    Parameters
    ----------
    client
    info
    worker
    process
        The process id of the worker, on its host.
    lost
        Called once, with the reason, when the worker cannot be reached any more.
    """

    def __init__(
        self, client: distributed.Client, info: ReplicaInfo, worker: DaskWorker, process: int,
        lost: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.info = info
        self.worker = worker
        self._client = client
        self._process = process
        self._lost: Callable[[str], object] | None = lost
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(min(MOST_CALLS, max(1, MOST_CALLS_OF_ALL // info.replicas)))
        self._futures: list[Any] = []  # of Dask: while they exist, the actors do
        self._actor: str | None = None  # its key in Dask; None before `start` and after `disconnect`
        self._waiting: set[asyncio.Future[Packet]] = set()  # the calls that have no outcome
        self._sending: set[asyncio.Task[None]] = set()  # the calls that Dask carries
        self._leaving: asyncio.Future[Packet] | None = None  # the reply to the last `Leave`
        self._doomed = False  # `kill` was called

    async def start(self, gpu: int) -> None:
        """Make the actor, and wait until it is there."""
        name = f"aiocuda-replica-{self.info.index}-{uuid.uuid4().hex}"
        where = {"workers": [self.worker.address], "allow_other_workers": False, "pure": False, "actor": True}
        submit = self._client.submit
        self._futures.append(submit(ReplicaActor, self.info, name, gpu, key=name, **where))
        self._futures.append(submit(ReplicaLease, name, key=f"{name}-lease", **where))
        for future in self._futures:
            error = await future.exception()
            if isinstance(error, Exception):
                raise error
            if error is not None:
                raise ConnectionResetError(f"Dask has cancelled the actor: {text_of(error)}")
        self._actor = name

    def call(self, request: Packet) -> asyncio.Future[Packet]:
        """Send a request, and return the future of its reply."""
        if self._actor is None:
            return unanswered("the worker of the replica has no actor")
        reply: asyncio.Future[Packet] = self._loop.create_future()
        self._waiting.add(reply)
        reply.add_done_callback(self._waiting.discard)
        # A cancelled reply leaves the task as it is: to cancel it would close the connection, which other calls use.
        task = start_task(self._deliver, self._actor, request, reply)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        if isinstance(request.message.body, Leave):
            self._leaving = reply
        return reply

    async def _deliver(self, actor: str, request: Packet, reply: asyncio.Future[Packet]) -> None:
        try:
            if isinstance(request.message.body, Run | Create):
                async with self._places:
                    if self._actor is None:
                        return  # disconnected while it waited, which has failed the reply
                    # Sent also if the reply is cancelled: the request carries the ids of settled calls.
                    packet = packet_of(await self._execute(actor, frames_of(request)))
            else:
                packet = packet_of(await self._execute(actor, frames_of(request)))
        except Exception as error:  # noqa: BLE001 - of Dask: those of methods are in the reply
            self._report(error)
            if not reply.done():
                reply.set_exception(error if isinstance(error, OSError) else ConnectionResetError(text_of(error)))
        else:
            if not reply.done():
                reply.set_result(packet)

    async def _execute(self, actor: str, frames: Frames) -> Frames:
        """Run `ReplicaActor.answer` on the worker, through the scheduler unless the client reaches workers directly."""
        serialize: Any = Serialize  # has no types
        arguments = [serialize(each) for each in frames]
        message = {"actor": actor, "function": "answer", "args": arguments, "kwargs": {}}
        scheduler: Any = self._client.scheduler
        if self._client.direct_to_workers:
            worker: Any = self._client.rpc(self.worker.address)
            answer = await worker.actor_execute(**message)
        else:
            answer = await scheduler.proxy(worker=self.worker.address, msg={"op": "actor_execute", **message})
        if answer["status"] != "OK":
            raise answer["exception"]
        result: Frames = answer["result"]
        return result

    def _report(self, error: Exception) -> None:
        """Report the loss: the connection of a call has ended. That of a `Watch` lasts as long as the replica."""
        lost, self._lost = self._lost, None
        if lost is not None:
            lost(f"its worker {self.worker.address} cannot be reached: {text_of(error)}")

    def disconnect(self) -> None:
        """Fail the calls that have no outcome, and release the actors. ``lost`` is not called any more.

        Calls that Dask carries are not cancelled: one that is cancelled while it connects leaves its socket open. They
        end with the worker, or with its objects.
        """
        self._lost = self._actor = None
        for reply in tuple(self._waiting):
            if not reply.done():
                reply.set_exception(ConnectionResetError("the worker of the replica was ended"))
        for future in self._futures:
            future.release()
        self._futures.clear()

    async def ended(self) -> None:
        """Wait until Dask carries no call; cancel those that need more than `END_SECONDS`."""
        if self._sending:
            _, late = await asyncio.wait(self._sending, timeout=END_SECONDS)
            for task in late:
                task.cancel()

    @property
    def has_actor(self) -> bool:
        """True after `start` and before `disconnect`."""
        return self._actor is not None

    @property
    def is_stuck(self) -> bool:
        """True if `kill` was called, or if the replica was asked to leave its objects and has not answered."""
        return self._doomed or (self._leaving is not None and not self._leaving.done())

    async def kill(self) -> None:
        """Let the nanny kill the worker, and wait until its process has ended. The nanny starts another one."""
        self._doomed = True
        nanny = self.worker.nanny
        try:
            async with asyncio.timeout(KILL_SECONDS):
                ended = (await self._client.run(kill_process, self._process, workers=[nanny]))[nanny]
            reason = None if ended else "its process has not ended"
        except Exception as error:  # noqa: BLE001 - the host, the nanny or the scheduler is gone
            reason = text_of(error)
        if reason is not None:
            log("warning", "replica_not_killed", replica=self.info.index, worker=self.worker.address, reason=reason)
