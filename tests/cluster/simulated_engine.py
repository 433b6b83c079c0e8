"""SimulatedEngine: replicas in one process, in virtual time, with messages that are late, repeated or lost."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
import random
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from aiocuda import DeviceFault
from aiocuda._processes._failures import Failure, failure_from
from aiocuda.cluster import ReplicaInfo
from aiocuda.cluster._engine import LostListener
from aiocuda.cluster._messages import Cancel, Create, Packet, Pickler, Probe, Reply, Request, Run, Watch
from aiocuda.cluster._server import ReplicaServer
from aiocuda.testing import SimulatedLoop

__all__ = ["InlineLoop", "SimulatedEngine", "SimulatedProcess"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: The longest time of a message that is not late, and of one that is.
MESSAGE_SECONDS, LATE_SECONDS = 0.1, 3.0


class InlineLoop(SimulatedLoop):
    """A loop in virtual time that calls the functions of all executors in a later turn, in its own thread."""

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        return super().run_in_executor(None, func, *args)


@dataclasses.dataclass(eq=False)
class SimulatedProcess:
    """The process of a replica in one epoch: a real server, and what has happened to it."""

    replica: int
    epoch: int
    server: ReplicaServer
    died: float | None = None  #: it has ended, or was killed
    silent: float | None = None  #: it answers nothing since then
    faulted: float | None = None
    failure: Failure | None = None
    objects: dict[int, str] = dataclasses.field(default_factory=dict)  #: ``"created"``, ``"failed"`` or ``"left"``
    creating: int = 0  #: requests that are not answered
    creations: dict[int, float] = dataclasses.field(default_factory=dict)  #: the time of the reply, by object; or inf
    creating_failed: bool = False
    watchers: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    cancelled: set[int] = dataclasses.field(default_factory=set)  #: ids whose `Cancel` has arrived

    @property
    def lives(self) -> bool:
        return self.died is None and self.silent is None


class SimulatedEngine:
    """Replicas in one process, in virtual time. A `random.Random` decides about all delays and losses.

    Parameters
    ----------
    chance
    on_call
        Called with the replica's index and a request when the cluster sends it.
    on_spawn
        Called with the replica's index and the epoch when the cluster starts a process.
    on_reply
        Called with the replica's index, the epoch and the id of a call when its reply arrives.
    on_close
        Called with the process of a lost replica, or None if it has not started, when the cluster has noticed that.
    """

    dumps: Pickler = staticmethod(pickle.dumps)

    def __init__(
        self,
        chance: random.Random,
        on_call: Callable[[int, Request, Packet], object],
        on_spawn: Callable[[int, int], object],
        on_close: Callable[[int, SimulatedProcess | None], object],
        on_reply: Callable[[int, int, int], object],
    ) -> None:
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._on_call, self._on_spawn, self._on_close, self._on_reply = on_call, on_spawn, on_close, on_reply
        self._lost: LostListener
        self._count = 0
        self.current: dict[int, SimulatedProcess] = {}
        self.processes: dict[tuple[int, int], SimulatedProcess] = {}
        self.quiet = False  #: from now on nothing is lost
        self.closed = False
        self.life = chance.choice([None, None, 10.0, 2.0, 0.3])  # mean seconds until a process is lost
        self.failing = chance.choice([0.0, 0.0, 0.2, 0.6])  # processes that do not start
        self.repeating = chance.choice([0.0, 0.3])  # messages that arrive twice
        self.late = chance.choice([0.0, 0.0, 0.1])  # messages that need seconds
        self.speed = chance.choice([1e-4, 1e-2, MESSAGE_SECONDS])  # seconds of a message

    # -- the protocol of an engine -------------------------------------------------------------------------------

    async def start(self, replicas: int, lost: LostListener) -> None:
        self._count, self._lost = replicas, lost

    async def spawn(self, replica: int, epoch: int) -> None:
        self._on_spawn(replica, epoch)
        await asyncio.sleep(self._chance.random() * 0.3)
        if epoch > 1 and not self.quiet and self._chance.random() < self.failing:
            raise OSError("the process has not started")
        server = ReplicaServer(ReplicaInfo(replica, self._count, epoch), pickle.dumps)
        process = SimulatedProcess(replica, epoch, server)
        self.current[replica] = self.processes[replica, epoch] = process
        if self.life is not None:
            self._loop.call_later(self._chance.expovariate(1 / self.life), self._harm, process)

    def call(self, replica: int, request: Packet) -> asyncio.Future[Packet]:
        reply: asyncio.Future[Packet] = self._loop.create_future()
        message: Request = request.message
        self._on_call(replica, message, request)
        process = self.current.get(replica)
        if isinstance(message.body, Create) and process is not None:
            process.creating += 1
            creations, number = process.creations, message.body.number
            creations[number] = math.inf
            reply.add_done_callback(lambda _: creations.update({number: self._loop.time()}))
        may_be_late = isinstance(message.body, Run)
        self._loop.call_later(self._delay(may_be_late), self._deliver, replica, request, reply)
        if self._chance.random() < self.repeating:
            later = self._delay() + self._chance.choice([0.0, LATE_SECONDS * self._chance.random()])
            self._loop.call_later(later, self._deliver, replica, request, reply)
        return reply

    def broadcast(self, request: Packet) -> list[asyncio.Future[Packet]]:
        return [self.call(replica, request) for replica in self.current]

    async def close(self, replica: int | None = None) -> None:
        if replica is None:
            self.closed = True
            ended = [self.kill(process) for process in self.current.values()]
            self.current.clear()
        else:
            process = self.current.pop(replica, None)
            self._on_close(replica, process)
            ended = [] if process is None else [self.kill(process)]
        if ended:
            await asyncio.wait(ended)

    # -- messages ------------------------------------------------------------------------------------------------

    def _delay(self, may_be_late: bool = False) -> float:
        if may_be_late and self._chance.random() < self.late:
            return LATE_SECONDS * self._chance.random()
        return self.speed * self._chance.random()

    def _deliver(self, replica: int, packet: Packet, reply: asyncio.Future[Packet]) -> None:
        process = self.current.get(replica)
        if process is None or not process.lives:
            if self._chance.random() < 0.2 and process is None:
                self._loop.call_later(self._delay(True), _fail, reply)
            return
        body, began = packet.message.body, self._loop.time()
        if isinstance(body, Watch) and packet.message.epoch == process.epoch:
            process.watchers.append(lambda: self._answer_fault(process, reply))
            if process.failure is not None:
                self._answer_fault(process, reply)
        if isinstance(body, Cancel) and packet.message.epoch == process.epoch:
            process.cancelled.update(body.ids)

        def answered(answer: asyncio.Future[Packet]) -> None:
            if answer.cancelled() or not process.lives:
                return
            made = answer.result()
            message: Reply = made.message
            message = message._replace(seconds=self._loop.time() - began)  # of virtual time
            if message.failure is not None and process.failure is not None:
                message = message._replace(fault=True)
            late = not isinstance(body, Probe | Watch | Create)
            self._loop.call_later(self._delay(late), self._arrive, process, body, reply, made._replace(message=message))

        process.server.submit(packet).add_done_callback(answered)

    def _answer_fault(self, process: SimulatedProcess, reply: asyncio.Future[Packet]) -> None:
        message = Packet(Reply(process.epoch, failure=process.failure, fault=True))
        self._loop.call_later(self._delay(), _set, reply, message)

    def _arrive(self, process: SimulatedProcess, body: Any, reply: asyncio.Future[Packet], made: Packet) -> None:
        if isinstance(body, Create) and not reply.done():
            process.creating -= 1
            process.creating_failed = process.creating_failed or made.message.failure is not None
        if isinstance(body, Run) and not reply.done():
            self._on_reply(process.replica, made.message.epoch, body.id)
        _set(reply, made)

    # -- losses --------------------------------------------------------------------------------------------------

    def _harm(self, process: SimulatedProcess) -> None:
        """End a process, stop it, or let its device fault."""
        if self.quiet or self.closed or not process.lives or process.faulted is not None:
            return
        chance, now = self._chance, self._loop.time()
        how = chance.randrange(4)
        if how == 0:
            process.silent = now
        elif how == 1:
            self.fault(process)
        else:
            self.kill(process)
            if chance.random() < 0.8:
                self._loop.call_later(chance.random() * chance.choice([0.01, 3.0]), self._report, process)

    def fault(self, process: SimulatedProcess) -> None:
        """Let the device of a process fault. It goes on to answer."""
        if process.lives and process.failure is None:
            process.faulted = self._loop.time()
            process.failure = failure_from(DeviceFault("it has faulted", code=700, device=0, operation=None))
            for watcher in process.watchers:
                watcher()

    def _report(self, process: SimulatedProcess) -> None:
        self._lost(process.replica, process.epoch, "its process has ended")

    def kill(self, process: SimulatedProcess) -> asyncio.Future[Any]:
        """End a process: its tasks are cancelled, and what they do from now on has no effect."""
        if process.died is None:
            process.died = self._loop.time()
        return process.server.leave()


def _set(reply: asyncio.Future[Packet], made: Packet) -> None:
    if not reply.done():
        reply.set_result(made)


def _fail(reply: asyncio.Future[Packet]) -> None:
    if not reply.done():
        reply.set_exception(ConnectionResetError("the process has ended"))
