"""A batcher under real uvicorn: clients that disconnect, read slowly, or are too many; the end under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import signal

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.helpers import quickly, until
from tests.serving.asgi.batch_program import BATCH, BATCHES, FAULT, LARGE, PART, PARTS, QUEUE
from tests.serving.asgi.server import Client, Server, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.heavy, pytest.mark.slow]

APP = "batch_program:app"
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
#: What requests hold while they are served.
HELD = ("queued", "running", "in_flight", "streams", "tasks", "files")
#: Where requests are when their clients leave.
LEFT = ("left_sending", "left_queued", "left_computed", "left_answered")


def send(client: Client, number: int, route: str = "compute", **options: float) -> None:
    """Send a request for the result of a number."""
    query = "".join(f"&{name}={value}" for name, value in options.items())
    client.send(f"/{route}?number={number}{query}", method="POST", body=b"body")


async def assert_result(client: Client, number: int, route: str = "compute") -> None:
    """Read the answer, and compare it with the result for the number."""
    status, body = await client.answer()
    assert status == 200
    result = 3 * number + 1
    if route == "compute":
        assert int(body.split()[0]) == result
    else:
        size = LARGE if route == "compute_large" else PART * PARTS
        assert body == bytes([result % 256]) * size


# -- clients that disconnect ------------------------------------------------------------------------------------


class Visitor:
    """One client, and the moment at which it disconnects."""

    def __init__(self, server: Server, number: int, chance: random.Random) -> None:
        self._server = server
        self._number = number
        self._chance = chance
        self.stayed = False

    async def visit(self) -> None:
        client = await self._server.client()
        kinds = [self.in_head, self.in_body, self.in_chunks, self.later, self.later, self.in_response, self.stay]
        await self._chance.choice(kinds)(client)
        (client.abort if self._chance.random() < 0.5 else client.leave)()

    async def pause(self, most: float) -> None:
        await asyncio.sleep(self._chance.uniform(0, most))

    async def in_head(self, client: Client) -> None:
        client.writer.write(b"POST /compute?number=%d HTTP/1.1\r\nhost: te" % self._number)
        await self.pause(0.01)

    async def in_body(self, client: Client) -> None:
        head = b"POST /compute?number=%d HTTP/1.1\r\nhost: test\r\ncontent-length: 100000\r\n\r\n"
        client.writer.write(head % self._number + bytes(self._chance.randrange(100_000)))
        await self.pause(0.05)

    async def in_chunks(self, client: Client) -> None:
        head = b"POST /compute?number=%d HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
        client.writer.write(head % self._number)
        for _ in range(self._chance.randrange(5)):
            client.writer.write(b"4\r\nbody\r\n")
            await self.pause(0.02)
        client.writer.write(b"4\r\nb")

    async def later(self, client: Client) -> None:
        send(client, self._number)
        await self.pause(0.15)

    async def in_response(self, client: Client) -> None:
        send(client, self._number, "compute_parts")
        await client.head()
        await client.reader.readexactly(1)
        await self.pause(0.02)

    async def stay(self, client: Client) -> None:
        for number, route in ((self._number, "compute"), (self._number + 10_000, "compute_parts")):
            send(client, number, route)
            await assert_result(client, number, route)
        self.stayed = True


@LOOPS
async def test_no_item_reaches_the_device_after_its_client_left_the_queue(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(23)
    # A busy server notices disconnects late, and keeps the requests of clients that have left in its queue.
    monkeypatch.setenv("BATCH_PROGRAM_QUEUE", "2000")
    async with serving("--loop", loop, "--no-access-log", app=APP) as server:
        before = await server.counts()
        visitors: list[Visitor] = []

        async def visits(count: int, places: int) -> None:
            """Let further visitors come, so many at a time."""
            free = asyncio.Semaphore(places)

            async def visit(visitor: Visitor) -> None:
                async with free:
                    await visitor.visit()

            first = len(visitors) + 1
            visitors.extend(Visitor(server, number, chance) for number in range(first, first + count))
            await asyncio.gather(*map(visit, visitors[first - 1 :]))

        await visits(2000, 200)
        after = await server.until(**{name: before[name] for name in HELD})
        while min(after[name] for name in LEFT) <= 20 and len(visitors) < 12_000:
            await visits(300, 20)  # on a slow machine: in a short queue, more clients leave during a batch
            after = await server.until(**{name: before[name] for name in HELD})
        assert after["late"] == 0
        assert after["accepted"] == after["answered"] + after["cancelled"]
        assert min(after[name] for name in LEFT) > 20, after
        assert sum(visitor.stayed for visitor in visitors) > 200
        server.terminate()
        await server.ended()
    assert "Traceback" not in server.text


async def fill(server: Server, queued: int, *, first: int) -> list[Client]:
    """Send a request for each batch that runs at a time, and then requests that wait. The batches are being held."""
    clients = []
    for number in range(first, first + BATCHES + queued):
        clients.append(await server.client())
        send(clients[-1], number)
        if len(clients) <= BATCHES:
            await server.until(queued=0, running=len(clients))
    await server.until(queued=queued, running=BATCHES)
    return clients


# -- the end ----------------------------------------------------------------------------------------------------


class Load:
    """Clients that send one request after the other, until the server takes no more."""

    def __init__(self, server: Server, clients: int = 64) -> None:
        self._server = server
        self.statuses: dict[int, int] = {}  # by number
        self.processes: set[int] = set()
        self.ended = 0  # clients that were refused
        self._numbers = itertools.count(1)
        self.tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        with contextlib.suppress(OSError):  # no more connections
            while True:
                client = await self._server.client()
                with contextlib.suppress(asyncio.IncompleteReadError):  # the server closed a connection without request
                    await self._requests(client)
                client.abort()
        self.ended += 1

    async def _requests(self, client: Client) -> None:
        for number in itertools.islice(self._numbers, 20):
            send(client, number)
            status, body = await client.answer()
            self.statuses[number] = status
            if status == 200:
                result, process = map(int, body.split())
                assert result == 3 * number + 1
                self.processes.add(process)


def begun(server: Server) -> set[int]:
    """Return the numbers of the requests that the service has accepted."""
    return {int(line.split()[1]) for line in server.lines if line.startswith("begun ")}


@LOOPS
async def test_sigterm_under_load_completes_what_the_batcher_has_accepted(loop: str) -> None:
    async with serving("--loop", loop, "--timeout-graceful-shutdown", "600", "--no-access-log", app=APP) as server:
        slow = await server.client()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        send(slow, 900_000, "compute_large")
        load = Load(server)
        await until(lambda: len(load.statuses) > 500)
        server.terminate()
        await quickly(asyncio.gather(*load.tasks))  # new connections are refused while one response is being sent
        assert "closes" not in server.lines
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await quickly(assert_result(slow, 900_000, "compute_large"))
        assert await server.ended() == -signal.SIGTERM
    assert set(load.statuses.values()) == {200}
    assert begun(server) == load.statuses.keys() | {900_000}
    assert load.ended == 64
    assert "closed" in server.lines
    assert "Traceback" not in server.text


async def test_batch_that_never_ends_does_not_delay_the_end_beyond_the_limits() -> None:
    async with serving("--timeout-graceful-shutdown", "1", "--no-access-log", app=APP) as server:
        await server.get("/hold")
        await fill(server, 10, first=1)
        server.terminate()
        assert await server.ended() == -signal.SIGTERM
    assert "closed" in server.lines


@LOOPS
@pytest.mark.parametrize("origin", ["batch", "elsewhere"])
async def test_fault_answers_waiting_and_running_requests_and_ends_with_the_code(loop: str, origin: str) -> None:
    async with serving("--loop", loop, "--timeout-graceful-shutdown", "600", app=APP) as server:
        slow, echo = await server.client(), await server.client()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        send(slow, 900_000, "compute_large")
        await server.until(answered=1)
        await server.get("/hold")
        echo.writer.write(b"POST /echo HTTP/1.1\r\nhost: test\r\ncontent-length: 4\r\n\r\nbo")
        # Each batch has one request that causes a fault: without a fault of its own, the other one could succeed.
        clients = await fill(server, 100, first=FAULT if origin == "batch" else 0)
        if origin == "batch":
            assert (await server.get("/release"))[0] == 200
        else:
            assert (await server.get("/fault_outside"))[0] == 503
        assert [(await quickly(client.answer()))[0] for client in clients] == [503] * len(clients)
        await until(lambda: "Shutting down" in server.text)
        echo.writer.write(b"dy")
        assert await quickly(echo.answer()) == (200, b"body")
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await quickly(assert_result(slow, 900_000, "compute_large"))
        assert await server.ended() == 70
    assert "closed" in server.lines
    assert "Traceback" not in server.text


async def test_worker_with_a_fault_is_replaced_and_every_accepted_request_is_answered() -> None:
    async with serving(*("--workers", "2", "--timeout-graceful-shutdown", "600", "--no-access-log"), app=APP) as server:
        await until(lambda: server.text.count("Application startup complete") == 2)
        load = Load(server, 32)
        await until(lambda: len(load.processes) == 2 and len(load.statuses) > 500)
        client = await server.client()
        send(client, FAULT)
        assert (await quickly(client.answer()))[0] == 503
        await until(lambda: re.search(r"worker \d+ ended with 70", server.text))
        await until(lambda: len(load.processes) == 3)
        server.terminate()
        await quickly(asyncio.gather(*load.tasks))
        await server.ended()
    assert set(load.statuses.values()) <= {200, 503}
    assert begun(server) == load.statuses.keys() | {FAULT}
    assert "Traceback" not in server.text


# -- slow clients, and too many ---------------------------------------------------------------------------------


async def test_clients_that_read_slowly_hold_no_place_of_the_batcher() -> None:
    async with serving("--timeout-graceful-shutdown", "1", "--no-access-log", app=APP) as server:
        numbers = itertools.count(1)

        async def batches(count: int = 20) -> None:
            for _ in range(count):
                batch = list(itertools.islice(numbers, BATCH))
                for client, number in zip(others, batch, strict=True):
                    send(client, number)
                for client, number in zip(others, batch, strict=True):
                    await assert_result(client, number)
                for client in slow:
                    await client.reader.readexactly(1024)

        others, slow = [await server.client() for _ in range(BATCH)], [await server.client() for _ in range(8)]
        for number, client in enumerate(slow, 900_000):
            send(client, number, "compute_large")
            assert (await quickly(client.head()))[0] == 200
        idle = await server.until(queued=0, running=0, in_flight=0)
        await quickly(batches())
        assert (await server.counts())["streams"] == idle["streams"] == 2
        rest = await quickly(slow[0].reader.readexactly(LARGE - 60 * 1024))
        assert rest == bytes([(3 * 900_000 + 1) % 256]) * len(rest)
        server.terminate()
        await server.ended()


async def test_overload_and_deadlines_have_their_status_codes_and_pass() -> None:
    async with serving("--timeout-graceful-shutdown", "1", app=APP) as server:
        await server.get("/hold")
        clients = await fill(server, QUEUE - 1, first=1)
        numbers = itertools.count(1_000)
        late = await server.client()
        send(late, next(numbers), deadline=0.05)
        assert (await quickly(late.answer()))[0] == 504
        clients.append(await server.client())
        send(clients[-1], len(clients))
        await server.until(queued=QUEUE)
        for _ in range(3):  # on the same connection
            send(late, next(numbers))
            status, headers = await quickly(late.head())
            assert status == 429
            assert int(headers["retry-after"]) >= 1
            await late.reader.readexactly(int(headers["content-length"]))
        assert (await server.get("/health"))[0] == 200
        await server.get("/release")
        for number, client in enumerate(clients, 1):
            await quickly(assert_result(client, number))
        number = next(numbers)
        send(late, number, deadline=600)
        await quickly(assert_result(late, number))
        counts = await server.until(queued=0, running=0, in_flight=0)
        assert counts["answered"] == len(clients) + 1
        server.terminate()
        await server.ended()
    assert "Traceback" not in server.text
