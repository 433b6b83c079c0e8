"""`Replicas` without processes: losses and failures while replicas start."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Collection
from typing import Any

import pytest

from aiocuda.cluster._engine import LostListener
from aiocuda.cluster._messages import Packet, Pickler, Reply, Request, Watch
from aiocuda.cluster._replicas import Replicas
from tests.cluster.simulated_engine import InlineLoop
from tests.helpers import quickly, until


class ScriptedEngine:
    """Its processes answer each request immediately.

    Parameters
    ----------
    lost
        The replicas and epochs that are lost in the moment in which they have started.
    failing, hanging
        Replicas that do not start. Replica i fails after i seconds.
    """

    dumps: Pickler = staticmethod(pickle.dumps)

    def __init__(
        self, lost: Collection[tuple[int, int]] = (), failing: Collection[int] = (), hanging: Collection[int] = ()
    ) -> None:  # fmt: skip
        self.replicas: Replicas | None = None
        self.states: list[tuple[int, str]] = []  #: of a replica without a process: its epoch, and its state
        self._lost, self._failing, self._hanging = lost, failing, hanging
        self._tell_lost: LostListener

    async def start(self, replicas: int, lost: LostListener) -> None:
        self._tell_lost = lost

    async def spawn(self, replica: int, epoch: int) -> None:
        self._note(replica)
        if replica in self._failing:
            await asyncio.sleep(replica)
            raise OSError(f"replica {replica}")
        if replica in self._hanging:
            await asyncio.Event().wait()
        if (replica, epoch) in self._lost:
            self.lose(replica, epoch)

    def _note(self, replica: int) -> None:
        assert self.replicas is not None
        each = list(self.replicas)[replica]
        self.states.append((each.epoch, each.state))

    def lose(self, replica: int, epoch: int) -> None:
        self._tell_lost(replica, epoch, "its process has ended")

    def call(self, replica: int, request: Packet) -> asyncio.Future[Packet]:
        reply: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        message: Request = request.message
        if not isinstance(message.body, Watch):
            reply.set_result(Packet(Reply(message.epoch)))
        return reply

    def broadcast(self, request: Packet) -> list[asyncio.Future[Packet]]:
        return []

    async def close(self, replica: int | None = None) -> None:
        if replica is not None:
            self._note(replica)


def replicas_of(engine: ScriptedEngine, count: int) -> Replicas:
    engine.replicas = Replicas(engine, count, 3)
    return engine.replicas


def run(main: Any) -> None:
    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        runner.run(main())


def test_a_replica_that_is_lost_when_it_has_started_does_not_run() -> None:
    async def main() -> None:
        engine = ScriptedEngine(lost=[(0, 2)])
        replicas = replicas_of(engine, 1)
        await replicas.start()
        (replica,) = replicas
        engine.lose(0, 1)
        await until(lambda: replica.epoch == 3 and replica.state == "running")
        assert engine.states[1:] == [(epoch, "restarting") for epoch in (1, 2, 2, 3)]
        await replicas.close()

    run(main)


def test_a_cluster_whose_replica_is_lost_when_it_has_started_does_not_open() -> None:
    async def main() -> None:
        replicas = replicas_of(ScriptedEngine(lost=[(0, 1)]), 1)
        with pytest.raises(RuntimeError, match="its process has ended"):
            await replicas.start()
        await replicas.close()

    run(main)


def test_the_first_replica_that_does_not_start_ends_the_others() -> None:
    async def main() -> None:
        replicas = replicas_of(ScriptedEngine(failing=[1], hanging=[0]), 2)
        with pytest.raises(OSError, match="replica 1"):
            await quickly(replicas.start())
        await replicas.close()

    run(main)


def test_all_failures_of_a_start_are_retrieved() -> None:
    reported: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        replicas = replicas_of(ScriptedEngine(failing=[0, 1, 2]), 3)
        with pytest.raises(OSError, match="replica"):
            await replicas.start()
        await until(lambda: all(replica.state == "stopped" for replica in replicas))
        await replicas.close()

    run(main)
    gc.collect()
    assert not reported
