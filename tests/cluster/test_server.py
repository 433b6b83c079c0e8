"""`ReplicaServer` without processes: requests in an unusual order."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from aiocuda.cluster._messages import ANY_EPOCH, Body, Create, Destroy, Leave, Packet, Reply, Request
from aiocuda.cluster._served_object import ReplicaInfo
from aiocuda.cluster._server import ReplicaServer
from aiocuda.errors import ClosedError
from tests.cluster.simulated_engine import InlineLoop

LEFT: list[int] = []


class Service:
    def __init__(self, number: int) -> None:
        self.number = number

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        LEFT.append(self.number)


PROGRAM = pickle.dumps((Service, (1,)))


async def answer(server: ReplicaServer, body: Body) -> Reply:
    reply: Reply = (await server.submit(Packet(Request(ANY_EPOCH, body)))).message
    return reply


def test_an_object_is_not_created_after_its_destruction() -> None:
    async def main() -> None:
        server = ReplicaServer(ReplicaInfo(0, 1, 1), pickle.dumps)
        LEFT.clear()
        assert (await answer(server, Create(1, PROGRAM))).failure is None
        assert (await answer(server, Destroy(1))).failure is None
        assert LEFT == [1]
        again = (await answer(server, Create(1, PROGRAM))).failure  # the request arrives twice
        assert again is not None
        assert isinstance(again.load(), ClosedError)
        await answer(server, Leave())
        assert LEFT == [1]

    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        runner.run(main())


@pytest.mark.filterwarnings("error")
def test_a_request_just_after_the_end_leaves_no_coroutine() -> None:
    async def main() -> None:
        server = ReplicaServer(ReplicaInfo(0, 1, 1), pickle.dumps)
        left = server.submit(Packet(Request(ANY_EPOCH, Leave())))
        destroyed = server.submit(Packet(Request(ANY_EPOCH, Destroy(1))))
        await left
        assert destroyed.cancelled()

    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        runner.run(main())
