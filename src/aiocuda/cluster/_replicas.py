"""Replicas: all replicas of a cluster, and the objects that they create."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from .._base._tasks import start_task
from .._processes._failures import text_of
from ..errors import ClosedError, ReplicaLostError
from ._engine import Engine
from ._messages import ANY_EPOCH, Destroy, Leave, Packet, Reply, Request, exception_of
from ._replica import Changes, Program, Replica, retrieve
from ._statistics import MethodTimes, ReplicaStatistics

__all__ = ["Replicas"]

#: Seconds that all replicas have to leave their objects.
LEAVE_SECONDS = 5.0


class Replicas:
    """All replicas of a cluster, and the objects that they create. Each replica is run by a task.

    Parameters
    ----------
    engine
    count
    restarts
        The most restarts of a replica in 60 s.
    """

    def __init__(self, engine: Engine, count: int, restarts: int) -> None:
        self.waiting = 0  #: calls that wait for a replica to be restarted
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._programs: dict[int, Program] = {}
        self._changes = Changes(self._loop)
        times = MethodTimes()
        self._replicas = [
            Replica(index, engine, self._programs, times, self._changes, restarts) for index in range(count)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    async def start(self) -> None:
        """Start all replicas. Raise the error of the first one that does not start."""
        await self._engine.start(
            len(self._replicas), lambda index, epoch, reason: self._replicas[index].on_lost(epoch, reason)
        )
        started: list[asyncio.Future[None]] = []
        for replica in self._replicas:
            started.append(self._loop.create_future())
            started[-1].add_done_callback(retrieve)
            task = start_task(replica.run, started[-1], name=f"aiocuda-replica-{replica.index}")
            self._tasks.append(task)
        done, _ = await asyncio.wait(started, return_when=asyncio.FIRST_EXCEPTION)
        for each in done:
            each.result()

    # -- objects -------------------------------------------------------------------------------------------------

    async def create(self, program: Program) -> None:
        """Create an object in all replicas, also in those that are started again later.

        Raises
        ------
        ReplicaLostError
            No replica is left, or the class ends the replicas.
        Exception
            That of the class. The object is then left where it was created.
        """
        created: dict[int, int | None] = {}  # by replica: the epoch, 0 after a loss, or None if it has stopped
        losses: list[ReplicaLostError] = []
        try:
            while missing := [
                replica for replica in self._replicas if created.get(replica.index, 0) != _epoch(replica)
            ]:
                outcomes = await asyncio.gather(
                    *(start_task(self._create, replica, program, losses) for replica in missing),
                    return_exceptions=True,
                )
                for replica, outcome in zip(missing, outcomes, strict=True):
                    if isinstance(outcome, BaseException):
                        raise outcome
                    created[replica.index] = outcome
                if losses and not any(created.values()):
                    raise _ends_replicas(program, losses[0]) from losses[0]
            if not any(created.values()):
                raise self._none_left()
        except BaseException:
            self._broadcast(Destroy(program.number))
            raise
        self._programs[program.number] = program  # each epoch that begins later creates it

    async def _create(self, replica: Replica, program: Program, losses: list[ReplicaLostError]) -> int | None:
        """Wait until a replica has created an object, and return the epoch; None if the replica has stopped.

        If it is lost while it creates the object, note that, and return 0.
        """
        while not self._closing:
            if replica.state == "stopped":
                return None
            if replica.state == "running":
                epoch = replica.epoch
                try:
                    error = await replica.create(program)
                except ReplicaLostError as loss:
                    if self._closing:
                        break
                    losses.append(loss)
                    return 0
                if error is not None:
                    raise error
                return epoch
            await self._changes.wait()
        raise ClosedError("the cluster was closed while an object was created")

    # -- calls ---------------------------------------------------------------------------------------------------

    async def choose(self) -> Replica:
        """Return the running replica with the least predicted work. Wait while all are being restarted.

        Raises
        ------
        ReplicaLostError
            No replica is left.
        """
        while True:
            running = [replica for replica in self._replicas if replica.state == "running"]
            if running:
                return min(running, key=lambda replica: replica.load)
            if all(replica.state == "stopped" for replica in self._replicas):
                raise self._none_left()
            self.waiting += 1
            try:
                await self._changes.wait()
            finally:
                self.waiting -= 1

    def _none_left(self) -> ReplicaLostError:
        losses = [f"replica {each.index}: {each.last_loss}" for each in self.statistics() if each.last_loss]
        reason = losses[-1] if losses else "the cluster was closed"
        return ReplicaLostError(
            f"no replica is left, and none is started again; {reason}", replica=None, epoch=None, reason=reason
        )

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        """Return a snapshot of each replica."""
        return tuple(replica.statistics() for replica in self._replicas)

    # -- the end -------------------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Refuse new objects: those that are being created fail."""
        self._closing = True
        self._changes.notify()

    async def close(self) -> list[str]:
        """Start none again, fail the calls in flight, leave the objects, and end the processes. Return the errors."""
        self.begin_close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        left = self._broadcast(Leave())
        for replica in self._replicas:
            replica.stop()
        errors: list[str] = []
        if left:
            done, late = await asyncio.wait(left, timeout=LEAVE_SECONDS)
            for each in done:
                if not each.cancelled() and each.exception() is None:
                    reply: Reply = each.result().message
                    if reply.failure is not None:
                        errors.append(text_of(exception_of(reply.failure, "a replica")))
            if late:
                errors.append(f"{len(late)} replicas have not left their objects within {LEAVE_SECONDS:g} s")
        await self._engine.close()
        return errors

    def _broadcast(self, body: Destroy | Leave) -> list[asyncio.Future[Packet]]:
        replies = self._engine.broadcast(Packet(Request(ANY_EPOCH, body)))
        for reply in replies:
            reply.add_done_callback(retrieve)
        return replies


def _ends_replicas(program: Program, loss: ReplicaLostError) -> ReplicaLostError:
    """Return the error of a class: each replica was lost while it created the object."""
    text = f"{program.name} was not created: each replica was lost while it created the object, the first one because "
    return ReplicaLostError(
        f"{text}{loss.reason}. Its constructor or __aenter__ may end the process, block the loop or fault the device: "
        f"try {program.name}(…) in a program without a cluster",
        replica=loss.replica, epoch=loss.epoch, reason=loss.reason,
    )  # fmt: skip


def _epoch(replica: Replica) -> int | None:
    return None if replica.state == "stopped" else replica.epoch
