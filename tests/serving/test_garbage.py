"""Requests leave nothing to the garbage collector: a long collection would stop a service, see `lifespan`."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from aiocuda import Device
from aiocuda.serving import Batch, DeadlineError, MicroBatcher, OverloadedError
from aiocuda.serving.asgi import CancelOnDisconnect, cancel_on_disconnect, error_responses, health, ready
from tests.helpers import quickly, turns

pytestmark = pytest.mark.asyncio

REQUESTS = 100


async def left_by(request: Callable[[], Awaitable[object]]) -> collections.Counter[str]:
    """Make requests, and return the types of the objects that the collector then finds, except for a few."""
    for _ in range(3):
        await request()
    await turns(5)
    gc.collect()
    gc.disable()
    try:
        for _ in range(REQUESTS):
            await request()
        await turns(5)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = collections.Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return collections.Counter({name: count for name, count in found.items() if count >= REQUESTS // 2})


# -- middlewares -----------------------------------------------------------------------------------------------------


class Client:
    """The `receive` and `send` of a request."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": b"1", "more_body": False})

    async def receive(self) -> Any:
        message = await self.messages.get()
        try:
            if isinstance(message, Exception):
                raise message
            return message
        finally:
            del message  # the traceback refers to this frame

    async def send(self, message: Any) -> None:
        pass


async def read(receive: Any) -> None:
    while (await receive()).get("more_body"):
        pass


async def respond(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def answers(scope: Any, receive: Any, send: Any) -> None:
    await read(receive)
    await respond(send)


async def fails(scope: Any, receive: Any, send: Any) -> None:
    await read(receive)
    raise ZeroDivisionError


async def overloaded(scope: Any, receive: Any, send: Any) -> None:
    await read(receive)
    raise OverloadedError("full", retry_after_s=1.0, queued=1)


async def waits(scope: Any, receive: Any, send: Any) -> None:
    await read(receive)
    await asyncio.Event().wait()


async def asks(scope: Any, receive: Any, send: Any) -> None:
    await read(receive)
    await receive()


@functools.cache
def application() -> Any:
    """An application of Starlette with a handler that is cancelled when its client disconnects."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    return Starlette(routes=[Route("/", cancel_on_disconnect(endpoint), methods=["POST"])])


async def endpoint(request: Any) -> Any:
    from starlette.responses import PlainTextResponse

    await request.body()
    if request.query_params:
        await asyncio.Event().wait()
    return PlainTextResponse("done")


async def decorated(scope: Any, receive: Any, send: Any) -> None:
    await application()(scope, receive, send)


def scope_of(query: bytes, length: bytes) -> dict[str, Any]:
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/", "raw_path": b"/", "root_path": "",
        "query_string": query, "scheme": "http", "headers": [(b"content-length", length)],
        "server": ("test", 80), "client": ("test", 1), "state": {},
    }  # fmt: skip


LEAVES: Any = {"type": "http.disconnect"}


@pytest.mark.parametrize("length", [b"0", b"1"])
@pytest.mark.parametrize(
    ("app", "query", "last"),
    [
        *[(answers, b"", None), (fails, b"", None), (overloaded, b"", None), (waits, b"", LEAVES)],
        *[(asks, b"", LEAVES), (asks, b"", ConnectionError()), (waits, b"", asyncio.CancelledError())],
        *[(decorated, b"", None), (decorated, b"wait", LEAVES), (health, b"", None)],
    ],
)
@pytest.mark.parametrize("middleware", [CancelOnDisconnect, error_responses, lambda app: app])
@pytest.mark.filterwarnings("ignore:a handler is not cancelled:RuntimeWarning")
async def test_middlewares(middleware: Any, app: Any, query: bytes, last: Any, length: bytes) -> None:
    if app is decorated:
        pytest.importorskip("starlette")
    within = middleware(app)

    async def request() -> None:
        client = Client()
        task = asyncio.ensure_future(within(scope_of(query, length), client.receive, client.send))
        await turns(6)
        if isinstance(last, asyncio.CancelledError) or (last is LEAVES and middleware is not CancelOnDisconnect):
            task.cancel()
        elif last is not None:
            client.messages.put_nowait(last if last is LEAVES else type(last)())
        await quickly(asyncio.wait({task}))
        if not task.cancelled():
            task.exception()

    assert not await left_by(request)


async def test_ready(device: Device) -> None:
    probe = ready(device)

    async def request() -> None:
        client = Client()
        await probe(scope_of(b"", b"0"), client.receive, client.send)

    assert not await left_by(request)


# -- the batcher -----------------------------------------------------------------------------------------------------


class Service:
    """A batcher whose function a test can hold."""

    def __init__(self, device: Device | None) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.batcher: MicroBatcher[str, str] = MicroBatcher(
            self.infer, max_batch_size=2, batch_wait_timeout_s=0, max_queued_requests=2, device=device
        )

    async def infer(self, batch: Batch[str]) -> list[Any]:
        await self.gate.wait()
        if "raise" in batch.items:
            raise ZeroDivisionError
        return [ZeroDivisionError() if item == "return" else item for item in batch.items]

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """A batch runs until the end of the block."""
        self.gate.clear()
        running = self.batcher.submit_nowait("")
        await turns(5)
        yield
        self.gate.set()
        await running

    async def answered(self) -> None:
        await self.batcher.submit("")

    async def answered_within_its_deadline(self) -> None:
        await self.batcher.submit("", deadline_s=60.0)

    async def raised(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            await self.batcher.submit("raise")

    async def returned(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            await self.batcher.submit("return")

    async def expired_in_the_queue(self) -> None:
        async with self.held():
            with contextlib.suppress(DeadlineError):
                await self.batcher.submit("", deadline_s=1e-6)

    async def expired_in_a_batch(self) -> None:
        self.gate.clear()
        with contextlib.suppress(DeadlineError):
            await self.batcher.submit("", deadline_s=1e-3)
        self.gate.set()
        await self.batcher.submit("")

    async def refused_for_its_deadline(self) -> None:
        with contextlib.suppress(DeadlineError):
            await self.batcher.submit("", deadline_s=-1.0)

    async def refused_for_overload(self) -> None:
        async with self.held():
            waiting = [self.batcher.submit_nowait("") for _ in range(2)]
            with contextlib.suppress(OverloadedError):
                await self.batcher.submit("")
        await asyncio.gather(*waiting)

    async def cancelled_in_the_queue(self) -> None:
        async with self.held():
            task = asyncio.ensure_future(self.batcher.submit(""))
            await turns(2)
            task.cancel()
            await asyncio.wait({task})

    async def cancelled_in_a_batch(self) -> None:
        self.gate.clear()
        task = asyncio.ensure_future(self.batcher.submit(""))
        await turns(5)
        task.cancel()
        await asyncio.wait({task})
        self.gate.set()
        await self.batcher.submit("")

    async def timed_out(self) -> None:
        async with self.held():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.batcher.submit(""), 1e-3)


@pytest.mark.parametrize("with_device", [False, True])
@pytest.mark.parametrize(
    "request_of", [name for name in vars(Service) if name[0] != "_" and name not in ("infer", "held")]
)
async def test_requests_of_a_batcher(device: Device, with_device: bool, request_of: str) -> None:
    service = Service(device if with_device else None)
    async with service.batcher:
        assert not await left_by(getattr(service, request_of))
