"""`ReplicaServer` without processes: requests in an unusual order."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from aiocuda.cluster import ReplicaInfo
from aiocuda.cluster._messages import ANY_EPOCH, Body, Create, Destroy, Leave, Packet, Reply, Request, Run
from aiocuda.cluster._server import ReplicaServer
from aiocuda.errors import ClosedError
from tests.cluster.simulated_engine import InlineLoop
from tests.cluster.things import KINDS, Kept
from tests.task_factories import each_factory, factory_of_tasks

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


async def results(methods: list[str], *arguments: Any) -> list[Packet]:
    """Return the replies to calls of a `Kept`, which are requested at once: the n-th one with the number n."""
    server = ReplicaServer(ReplicaInfo(0, 1, 1), pickle.dumps)
    assert (await answer(server, Create(1, pickle.dumps((Kept, ()))))).failure is None
    calls = [
        server.submit(Packet(Request(1, Run(number, 1, method, pickle.dumps((number, *arguments))))))
        for number, method in enumerate(methods)
    ]
    replies = [await call for call in calls]
    await answer(server, Leave())
    return replies


def value_of(packet: Packet) -> Any:
    reply: Reply = packet.message
    assert reply.failure is None, reply.failure.trace
    assert reply.result is not None
    return packet.load(reply.result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["plain", "coroutine", "awaitable"])
def test_an_array_that_the_object_writes_again_is_not_in_an_earlier_reply(method: str, kind: str) -> None:
    replies = asyncio.run(results([method] * 50, kind))
    for number, reply in enumerate(replies):
        assert (KINDS[kind](value_of(reply)) == number).all()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("method", ["fresh", "fresh_coroutine"])
def test_an_array_that_has_no_other_user_is_not_copied(method: str, nested: bool) -> None:
    (reply,) = asyncio.run(results([method], nested))
    (buffer,) = reply.buffers
    assert isinstance(buffer.obj, np.ndarray)


def test_bytes_are_not_copied() -> None:
    (reply,) = asyncio.run(results(["constant"]))
    (buffer,) = reply.buffers
    assert isinstance(buffer.obj, bytes)


@each_factory
@pytest.mark.parametrize("method", ["plain", "coroutine"])
def test_a_replica_answers_with_each_task_factory(method: str, factory: str) -> None:
    """That of its own process."""

    async def main() -> list[Packet]:
        with factory_of_tasks(factory):
            return await results([method] * 9)

    assert [value_of(reply)[0] for reply in asyncio.run(main())] == list(range(9))
