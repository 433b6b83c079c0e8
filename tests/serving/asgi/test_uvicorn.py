"""The service under real uvicorn, with clients on raw sockets."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import signal

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.helpers import PATIENCE, quickly, until
from tests.serving.asgi.server import Client, Server, serving
from tests.serving.asgi.service_program import LARGE

pytestmark = [pytest.mark.asyncio, pytest.mark.heavy, pytest.mark.slow]

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
#: The parsers of uvicorn. The second one is a part of ``uvicorn[standard]``.
HTTP = pytest.mark.parametrize(
    "http", ["h11", *(["httptools"] if importlib.util.find_spec("httptools") is not None else [])]
)


@LOOPS
@HTTP
async def test_disconnect_cancels_the_handler(loop: str, http: str) -> None:
    async with serving("--loop", loop, "--http", http) as server:
        gone = 0
        kinds = ["none", "length", "chunked", "keep-alive"]
        if http == "h11":  # with httptools, uvicorn stops reading from a client that sends two requests
            kinds.append("pipelined")
        for kind in kinds:
            for leave in (Client.leave, Client.abort):
                client = await server.client()
                if kind == "none":
                    client.send("/wait")
                elif kind == "length":
                    client.send("/wait", method="POST", body=b"x" * 100_000)
                elif kind == "chunked":
                    client.send("/wait", method="POST", body=b"x" * 100_000, chunked=True)
                elif kind == "keep-alive":
                    assert (await client.get("/health"))[0] == 200
                    client.send("/wait", method="POST", body=b"x")
                else:  # in one segment: uvicorn stops reading from a client that sends the next request later
                    client.writer.write(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\nGET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
                await server.until(begun=gone + 1, streams=1)
                leave(client)
                gone += 1
                await server.until(begun=gone, cancelled=gone, streams=0)
        assert (await server.counts())["done"] == 0
        server.terminate()
        await server.ended()
    assert "Traceback" not in server.text
    assert "Exception in ASGI application" not in server.text


async def test_many_clients_that_disconnect_leave_nothing() -> None:
    async with serving() as server:

        async def one(number: int) -> None:
            client = await server.client()
            client.send("/wait", method="POST", body=b"x" * number, chunked=bool(number % 2))
            await asyncio.sleep(number % 7 / 100)
            (client.abort if number % 3 else client.leave)()

        await quickly(asyncio.gather(*(one(number) for number in range(1, 201))))
        await until_idle(server)
        counts = await server.counts()
        assert counts["begun"] == counts["cancelled"]
        server.terminate()
        await server.ended()
    assert "Traceback" not in server.text


async def until_idle(server: Server) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            counts = await server.counts()
            if counts["begun"] == counts["cancelled"] + counts["done"] and counts["streams"] == 0:
                return
            await asyncio.sleep(0.01)


@LOOPS
async def test_sigterm_under_load_loses_no_accepted_request(loop: str) -> None:
    answered: set[int] = set()
    refused = 0

    async def client(first: int) -> None:
        nonlocal refused
        for number in range(first, first + 10_000):
            try:
                status, body = await server.get(f"/work?number={number}&ms=5", method="POST", body=b"body")
            except (OSError, asyncio.IncompleteReadError):
                refused += 1
                return
            assert (status, body) == (200, b"%d 4" % number)
            answered.add(number)

    async with serving("--loop", loop, "--timeout-graceful-shutdown", "600", "--no-access-log") as server:
        clients = asyncio.gather(*(client(10_000 * number) for number in range(16)))
        await until(lambda: len(answered) > 100)
        server.terminate()
        await quickly(clients)
        assert await server.ended() == -signal.SIGTERM  # uvicorn raises the signal again when it has ended
    begun = {int(line.split()[1]) for line in server.lines if line.startswith("begun ")}
    assert begun == answered
    assert refused == 16
    assert "closed" in server.lines
    assert "Traceback" not in server.text


async def test_handler_that_exceeds_the_time_of_the_shutdown_is_cancelled() -> None:
    async with serving("--timeout-graceful-shutdown", "1") as server:
        client = await server.client()
        client.send("/wait")
        await server.until(begun=1)
        server.terminate()
        await server.ended()
    assert [line for line in server.lines if line.startswith("closes ") and "'cancelled': 1" in line]
    assert "closed" in server.lines


@LOOPS
async def test_fault_answers_every_request_and_ends_with_the_code(loop: str) -> None:
    async with serving("--loop", loop, "--timeout-graceful-shutdown", "600") as server:
        assert (await server.get("/health"))[0] == (await server.get("/ready"))[0] == 200
        clients = [await server.client() for _ in range(20)]
        for client in clients:
            client.send("/on_device")
        await server.until(begun=20)
        statuses = [(await server.get("/fault"))[0]]
        statuses += [(await quickly(client.answer()))[0] for client in clients]
        assert set(statuses) == {503}
        assert await server.ended() == 70
    assert "closed" in server.lines
    assert "Application shutdown complete" in server.text
    assert "Traceback" not in server.text


async def test_fault_while_no_request_runs_ends_the_process() -> None:
    async with serving("--timeout-graceful-shutdown", "600") as server:
        assert (await server.get("/fault_later"))[0] == 200
        assert await server.ended() == 70


async def test_fault_after_sigterm_ends_with_the_code_and_loses_no_request() -> None:
    async with serving("--timeout-graceful-shutdown", "600") as server:
        waiting = [await server.client() for _ in range(5)]
        for client in waiting:
            client.send("/on_device")
        await server.until(begun=5)
        late = await server.client()
        late.writer.write(b"POST /fault HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbo")
        await server.get("/health")
        server.terminate()
        await until(lambda: "Shutting down" in server.text)
        late.writer.write(b"dy")
        assert {(await quickly(client.answer()))[0] for client in [*waiting, late]} == {503}
        assert await server.ended() == 70
    assert "closed" in server.lines
    assert "Traceback" not in server.text


async def test_worker_ends_with_the_code_and_is_replaced() -> None:
    async with serving("--workers", "2", "--timeout-graceful-shutdown", "600") as server:
        await until(lambda: server.text.count("Application startup complete") == 2)
        client = await server.client()
        counts = await server.counts()
        assert counts["begun"] == 0
        assert (await client.get("/fault"))[0] == 503
        await until(lambda: re.search(r"worker \d+ ended with 70", server.text))
        await until(lambda: server.text.count("Application startup complete") == 3)
        assert {(await server.get("/work?ms=1"))[0] for _ in range(10)} == {200}
        server.terminate()
        await server.ended()
    assert "Traceback" not in server.text


async def test_client_that_does_not_read_holds_nothing_of_the_device() -> None:
    async with serving("--timeout-graceful-shutdown", "1") as server:
        clients = [await server.client() for _ in range(4)]
        for client in clients:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send("/large")
        await server.until(begun=4, done=4, streams=0)
        clients[0].writer.transport.resume_reading()  # type: ignore[attr-defined]
        status, body = await quickly(clients[0].answer())
        assert (status, len(body)) == (200, LARGE)
        server.terminate()
        await server.ended()
    assert "closed" in server.lines
