"""The client, with small asyncio servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.helpers import PATIENCE, quickly, until
from tests.load.client import Client
from tests.load.connection import post
from tests.load.measure import held
from tests.load.outcomes import Outcome, summarise

Answer = Callable[[int], Awaitable[bytes]]


def response(body: bytes, status: str = "200 OK", fields: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{fields}\r\n".encode() + body


def request(number: int) -> bytes:
    return post("/", b"%d" % number)


def is_right(number: int, body: bytes) -> bool:
    return body == b"%d" % number


class SmallServer:
    """Answers each request as a function says, and counts connections."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.open = self.most_open = self.made = 0
        self.seen: list[int] = []
        self.times: list[float] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.made += 1
        self.most_open = max(self.most_open, self.open)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                number = int(await reader.readexactly(length))
                self.seen.append(number)
                self.times.append(time.monotonic())
                answer = await self._answer(number)
                if not answer:
                    break
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed the connection
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[SmallServer, int]]:
    small = SmallServer(answer)
    server = await asyncio.start_server(small.serve, "127.0.0.1", 0)
    try:
        yield small, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await until(lambda: small.open == 0, "the end of all connections")
        await server.wait_closed()


async def right(number: int) -> bytes:
    return response(b"%d" % number)


@pytest.mark.asyncio
async def test_each_request_has_its_own_response() -> None:
    async with serving(right) as (server, port), Client(port, request, is_right) as client:
        outcomes = await quickly(client.open_loop([0.0, 0.0, 0.001, 0.002, 0.05], drain_s=PATIENCE))
    assert [outcome.number for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert all(outcome.is_accepted for outcome in outcomes)
    assert sorted(server.seen) == [0, 1, 2, 3, 4]
    assert all(0 <= outcome.latency for outcome in outcomes)
    assert outcomes[4].answered is not None
    assert outcomes[4].answered >= 0.05


@pytest.mark.asyncio
async def test_connections_are_used_again() -> None:
    async with serving(right) as (server, port), Client(port, request, is_right, most_connections=3) as client:
        outcomes = await quickly(client.closed_loop(3, 0.05))
        while len(outcomes) <= 3:
            outcomes += await quickly(client.closed_loop(3, 0.05))
    assert all(outcome.is_accepted for outcome in outcomes)
    assert server.made == server.most_open == 3


@pytest.mark.asyncio
async def test_requests_beyond_the_connections_wait_and_their_latency_counts_from_the_schedule() -> None:
    gate = asyncio.Event()

    async def gated(number: int) -> bytes:
        await gate.wait()
        return response(b"%d" % number)

    async with serving(gated) as (server, port), Client(port, request, is_right, most_connections=2) as client:
        run = asyncio.create_task(client.open_loop([0.0] * 6, drain_s=PATIENCE))
        await until(lambda: len(server.seen) == 2, "two requests at the server")
        opened = asyncio.get_running_loop().time()
        gate.set()
        outcomes = await quickly(run)
        assert asyncio.get_running_loop().time() >= opened
    assert server.most_open == 2
    assert all(outcome.is_accepted for outcome in outcomes)
    for outcome in outcomes[2:]:
        assert outcome.sent is not None
        assert outcome.answered is not None
        assert outcome.sent >= min(one.answered for one in outcomes[:2] if one.answered is not None)
        assert outcome.latency == outcome.answered - 0.0
    assert summarise(outcomes, 0.1, 0.0, 1.0).held == 1.0  # none of them found an open connection


@pytest.mark.asyncio
async def test_server_that_never_answers_ends_the_run_after_the_drain_time() -> None:
    never = asyncio.Event()

    async def silent(number: int) -> bytes:
        await never.wait()
        return b""

    async with serving(silent) as (_, port):
        async with Client(port, request, is_right, most_connections=2) as client:
            outcomes = await quickly(client.open_loop([0.0] * 5, drain_s=0.02))
        never.set()
    assert [outcome.problem for outcome in outcomes] == ["no response until the end of the run"] * 5
    assert [outcome.latency for outcome in outcomes] == [float("inf")] * 5


@pytest.mark.asyncio
async def test_disconnected_request_is_a_problem_and_the_next_one_gets_a_new_connection() -> None:
    async def first_hangs_up(number: int) -> bytes:
        return b"" if number == 0 else response(b"%d" % number)

    async with serving(first_hangs_up) as (server, port), Client(port, request, is_right, most_connections=1) as client:
        outcomes = await quickly(client.open_loop([0.0, 0.0, 0.0], drain_s=PATIENCE))
    assert [outcome.problem for outcome in outcomes] == ["disconnected", "", ""]
    assert server.made == 2


@pytest.mark.asyncio
async def test_no_server_is_a_problem_of_each_request() -> None:
    async with serving(right) as (_, port):
        pass
    async with Client(port, request, is_right, most_connections=1) as client:
        outcomes = await quickly(client.open_loop([0.0, 0.0, 0.001], drain_s=PATIENCE))
    assert all(outcome.problem.startswith("no connection") for outcome in outcomes)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [
        (response(b"7"), 200, "wrong result"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n0\r\n0\r\n\r\n", 0, "without Content-Length"),
        (b"x" * 20_000, 0, "a head of more than"),
        (response(b"", "503 Service Unavailable"), 503, ""),
    ],
)
async def test_answer_that_is_no_right_result(answer: bytes, status: int, problem: str) -> None:
    async def other(number: int) -> bytes:
        return answer

    async with serving(other) as (_, port), Client(port, request, is_right) as client:
        (outcome,) = await quickly(client.open_loop([0.0], drain_s=PATIENCE))
    assert outcome.status == status
    assert problem in outcome.problem
    assert not outcome.is_accepted


@pytest.mark.asyncio
async def test_response_in_pieces_is_one_response() -> None:
    whole = response(b"0")
    pieces = asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n0")
        for byte in whole:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await pieces.get()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Client(server.sockets[0].getsockname()[1], request, is_right) as client:
        (outcome,) = await quickly(client.open_loop([0.0], drain_s=PATIENCE))
        pieces.put_nowait(b"")
    assert outcome.is_accepted


@pytest.mark.asyncio
async def test_refused_request_is_sent_again_at_the_time_that_the_caller_returns() -> None:
    async def first_is_refused(number: int) -> bytes:
        if number == 0:
            return response(b"", "429 Too Many Requests", "Retry-After: 1\r\n")
        return response(b"%d" % number)

    def again(outcome: Outcome) -> float | None:
        return 0.02 if outcome.is_refused and outcome.retry_after == 1.0 else None

    async with serving(first_is_refused) as (_, port), Client(port, request, is_right) as client:
        outcomes = await quickly(client.open_loop([0.0, 0.01, 0.05], drain_s=PATIENCE, retry=again))
    assert [(outcome.scheduled, outcome.attempt) for outcome in outcomes] == [(0.0, 0), (0.01, 0), (0.02, 1), (0.05, 0)]
    assert outcomes[0].is_refused
    assert all(outcome.is_accepted for outcome in outcomes[1:])
    assert held(outcomes, 0.01, PATIENCE).sent == 1
    assert held(outcomes, 0.01, PATIENCE).held == 1.0
    assert held(outcomes, 0.03, PATIENCE).held is None


@pytest.mark.asyncio
async def test_late_client_reports_its_lateness() -> None:
    def busy(number: int) -> bytes:
        end = time.monotonic() + (0.03 if number == 0 else 0.0)
        while time.monotonic() < end:
            pass
        return request(number)

    async with serving(right) as (_, port), Client(port, busy, is_right) as client:
        await quickly(client.open_loop([0.0], drain_s=PATIENCE))  # opens the connection
        outcomes = await quickly(client.open_loop([0.0, 0.001], drain_s=PATIENCE))
    figures = summarise(outcomes, 0.1, 0.0, 1.0)
    assert outcomes[1].reached is not None
    assert outcomes[1].reached >= 0.03
    assert outcomes[1].latency >= 0.029
    assert figures.late_most_ms >= 29
    assert not figures.kept_schedule


@pytest.mark.asyncio
async def test_two_runs_of_a_client_do_not_overlap() -> None:
    gate = asyncio.Event()

    async def gated(number: int) -> bytes:
        await gate.wait()
        return response(b"%d" % number)

    async with serving(gated) as (server, port), Client(port, request, is_right) as client:
        run = asyncio.create_task(client.open_loop([0.0], drain_s=PATIENCE))
        await until(lambda: server.seen)
        with pytest.raises(RuntimeError, match="another run"):
            await client.closed_loop(1, 1.0)
        gate.set()
        await quickly(run)
    with pytest.raises(RuntimeError, match="closed"):
        await client.closed_loop(1, 1.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("most", [0, -1])
async def test_client_without_a_connection_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Client(1, request, is_right, most_connections=most)
