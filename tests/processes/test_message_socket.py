"""Messages over a socket pair, on an event loop."""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
from typing import Any

import numpy as np
import pytest

from aiocuda._processes._message_socket import SMALL, MessageSocket
from tests.helpers import UVLOOP, until


def buffer(array: Any) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(array)


class End:
    """One end of a pair: the messages that it has received, and whether it has lost the other end."""

    def __init__(self, pipe: socket.socket) -> None:
        self.pipe = pipe
        self.received: list[tuple[Any, bytes]] = []
        self.lost = 0
        self.socket = MessageSocket(asyncio.get_running_loop(), pipe, self._receive, self._lose)

    def _receive(self, value: Any, rest: memoryview) -> None:
        self.received.append((value, bytes(rest)))

    def _lose(self) -> None:
        self.lost += 1


def pair() -> tuple[End, End]:
    one, two = socket.socketpair()
    return End(one), End(two)


async def exchange(seed: int) -> None:
    """Send messages of random sizes both ways at the same time."""
    random_ = random.Random(seed)
    ends = pair()
    sent: list[list[tuple[Any, bytes]]] = [[], []]
    sizes = [0, 1, 100, SMALL - 40, SMALL, SMALL + 1, 300_000, 5_000_000]
    for number in range(60):
        at = random_.randrange(2)
        arrays = [
            np.frombuffer(random_.randbytes(random_.choice(sizes)), np.uint8) for _ in range(random_.randrange(4))
        ]
        ends[at].socket.send(number, [buffer(array) for array in arrays])
        sent[at].append((number, b"".join(array.tobytes() for array in arrays)))
        if random_.random() < 0.3:
            await asyncio.sleep(0)
    await until(lambda: [len(end.received) for end in ends] == [len(sent[1]), len(sent[0])])
    assert ends[0].received == sent[1]
    assert ends[1].received == sent[0]
    ends[0].socket.close()
    await until(lambda: ends[1].lost)
    assert (ends[0].lost, ends[1].lost) == (0, 1)
    assert ends[1].socket.closed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("uvloop", [False, True])
def test_messages_of_all_sizes_arrive_in_order(seed: int, uvloop: bool) -> None:
    if uvloop and UVLOOP is None:
        pytest.skip("uvloop is not installed")
    with asyncio.Runner(loop_factory=UVLOOP if uvloop else None) as runner:
        runner.run(exchange(seed))


@pytest.mark.asyncio
async def test_arrays_arrive_in_memory_of_their_own_and_writeable() -> None:
    one, two = socket.socketpair()
    found: list[memoryview] = []
    receiver = MessageSocket(asyncio.get_running_loop(), two, lambda _, rest: found.append(rest), lambda: None)
    sender = End(one)
    for size in (10, 10, 1_000_000):
        sender.socket.send(None, [buffer(np.full(size, size % 256, np.uint8))])
    await until(lambda: len(found) == 3)
    assert not any(view.readonly for view in found)
    found[0][:] = bytes(10)
    assert bytes(found[1]) == bytes([10] * 10)
    receiver.close()
    sender.socket.close()


@pytest.mark.asyncio
async def test_closing_drops_unsent_messages_and_calls_nothing() -> None:
    one, two = pair()
    one.socket.send(None, [buffer(np.ones(20_000_000, np.uint8))])
    one.socket.close()
    one.socket.close()
    one.socket.send("after the end")
    await until(lambda: two.lost)
    assert (one.lost, two.received) == (0, [])


@pytest.mark.asyncio
async def test_other_end_that_closes_while_a_message_is_sent_is_lost_once() -> None:
    one, two = pair()
    one.socket.send(None, [buffer(np.ones(20_000_000, np.uint8))])
    two.socket.close()
    one.socket.send("more")
    await until(lambda: one.lost)
    await asyncio.sleep(0)
    assert one.lost == 1


@pytest.mark.asyncio
async def test_receiver_that_closes_its_end_gets_no_further_message() -> None:
    one, two = socket.socketpair()
    found: list[Any] = []

    def receive(value: Any, rest: memoryview) -> None:
        found.append(value)
        receiver.close()

    receiver = MessageSocket(asyncio.get_running_loop(), two, receive, lambda: None)
    sender = End(one)
    for number in range(3):
        sender.socket.send(number)
    await until(lambda: sender.lost)
    assert found == [0]
