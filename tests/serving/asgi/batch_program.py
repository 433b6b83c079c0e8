"""A service with a batcher on the host driver, for the tests with uvicorn. It notes how far each request has come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import aiocuda
from aiocuda import Kernel
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.serving.asgi import CancelOnDisconnect, error_responses, health, lifespan
from aiocuda.serving.asgi._protocol import ASGIApp, Message, Receive, Scope, Send
from aiocuda.testing import kernels
from tests.serving.asgi.service_program import SPIN, TRAP, fault, report

AFFINE = Kernel(kernels.AFFINE.name, source=kernels.AFFINE.source, host=kernels.AFFINE.host)

BATCH, BATCHES = 16, 2
QUEUE = int(os.environ.get("BATCH_PROGRAM_QUEUE", 256))
#: Seconds of the device for each batch.
BATCH_TIME = 0.01
#: Bytes of a response that no socket buffer holds, and the parts of a response that is sent in parts.
LARGE, PART, PARTS = 16 << 20, 1 << 10, 16
#: Items from this one on cause a device fault.
FAULT = 1_000_000


class Progress:
    """How far each request has come, by the number of its item.

    The event loop runs everything here in one thread, so the order of the calls is the order of the events.
    """

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self.counts = Counter({f"left_{state}": 0 for state in ("sending", "queued", "computed", "answered")})
        self.counts["late"] = 0

    def begin(self, number: int) -> None:
        """Note a new request. The tests use each number once."""
        assert number not in self._states, number
        self._states[number] = "sending"

    def reach(self, number: int, state: str) -> None:
        """Note a state of a request that has not left."""
        if self._states.get(number) != "left":
            self._states[number] = state

    def compute(self, number: int) -> None:
        """Note that the function of the batcher has an item. None may come after its client has left."""
        self.counts["late"] += self._states[number] == "left"
        self.reach(number, "computed")

    def leave(self, number: int) -> None:
        """Note that the server has reported the disconnect. It also does so after the end of a response."""
        state = self._states[number]
        if state not in ("left", "done"):
            self.counts[f"left_{state}"] += 1
            self._states[number] = "left"


progress = Progress()
#: Set, except while a test holds the batches.
released = asyncio.Event()
released.set()


class NoteDisconnects:
    """The outermost middleware: notes the begin of a request, and the moment at which uvicorn reports a disconnect."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = _number(scope) if scope["type"] == "http" else None
        if number is None:
            await self._app(scope, receive, send)
            return

        async def note() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                progress.leave(number)
            return message

        async def note_end(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                progress.reach(number, "done")
            await send(message)

        progress.begin(number)
        await self._app(scope, note, note_end)


def _number(scope: Scope) -> int | None:
    number = urllib.parse.parse_qs(scope["query_string"]).get(b"number")
    return None if number is None else int(number[0])


async def infer(batch: Batch[int]) -> list[int]:
    """Return ``3 * item + 1`` for each item."""
    for item in batch.items:
        progress.compute(item)
    await released.wait()
    data = await batch.stream.upload(np.array(batch.items, np.uint32))
    batch.stream.launch(SPIN, 1, 1, int(BATCH_TIME * 1e9))
    if max(batch.items) >= FAULT:
        batch.stream.launch(TRAP, 1, 1)
    batch.stream.launch(AFFINE, 1, 32, data, batch.size, 3, 1)
    return [int(each) for each in await batch.stream.download(data)]


async def computed(request: Request) -> int:
    """Return the result for the request's number."""
    number = int(request.query_params["number"])
    await request.body()
    report(f"begun {number}")
    deadline = request.query_params.get("deadline")
    progress.reach(number, "queued")
    batcher: MicroBatcher[int, int] = request.state.batcher
    result = await batcher.submit(number, deadline_s=None if deadline is None else float(deadline))
    progress.reach(number, "answered")
    return result


async def compute(request: Request) -> Response:
    return PlainTextResponse(f"{await computed(request)} {os.getpid()}")


async def compute_large(request: Request) -> Response:
    return Response(bytes([await computed(request) % 256]) * LARGE)


async def compute_parts(request: Request) -> Response:
    """Send the result in parts, with some time between them."""
    part = bytes([await computed(request) % 256]) * PART

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(PARTS):
            yield part
            await asyncio.sleep(0.002)

    return StreamingResponse(parts(), headers={"content-length": str(PART * PARTS)})


async def echo(request: Request) -> Response:
    """Use no device."""
    return Response(await request.body())


async def hold(request: Request) -> Response:
    """Hold the batches that begin from now on."""
    released.clear()
    return PlainTextResponse("held")


async def release(request: Request) -> Response:
    released.set()
    return PlainTextResponse("released")


async def fault_outside(request: Request) -> Response:
    """Cause a fault on another stream than the batcher's, then release the batches."""
    try:
        return await fault(request)
    finally:
        released.set()


async def left_while_sending(request: Request, error: Exception) -> Response:
    """Return a response that no client receives. Without this, Starlette logs an error for each such client."""
    return Response(status_code=499)


async def count(request: Request) -> Response:
    batcher, device = request.state.batcher.statistics(), request.state.device.statistics()
    return JSONResponse(
        {
            **progress.counts, "queued": batcher.queued, "running": batcher.running, "cancelled": batcher.cancelled,
            "accepted": batcher.accepted, "answered": batcher.answered, "failed": batcher.failed,
            "batches": batcher.batches, "in_flight": device.in_flight, "streams": device.streams,
            "tasks": len(asyncio.all_tasks()), "files": len(os.listdir("/proc/self/fd")), "pid": os.getpid(),
        }
    )  # fmt: skip


@contextlib.asynccontextmanager
async def setup(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    async with aiocuda.open_device(driver="host") as device:
        device.drain_timeout = 1
        for kernel in (SPIN, TRAP, AFFINE):
            await device.load(kernel)
        async with MicroBatcher(
            infer, max_batch_size=BATCH, max_queued_requests=QUEUE, max_concurrent_batches=BATCHES, device=device
        ) as batcher:
            yield {"device": device, "batcher": batcher}
            report("closes")
    report("closed")


app = Starlette(
    routes=[
        Route("/compute", compute, methods=["POST"]),
        Route("/compute_large", compute_large, methods=["POST"]),
        Route("/compute_parts", compute_parts, methods=["POST"]),
        Route("/echo", echo, methods=["POST"]),
        Route("/hold", hold),
        Route("/release", release),
        Route("/fault_outside", fault_outside),
        Route("/count", count),
        Route("/health", health),
    ],
    middleware=[Middleware(NoteDisconnects), Middleware(CancelOnDisconnect), Middleware(error_responses)],
    exception_handlers={ClientDisconnect: left_while_sending},
    lifespan=lifespan(setup, exit_on_fault=70),
)
