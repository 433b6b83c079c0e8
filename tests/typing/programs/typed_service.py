"""A service: rows of several requests are computed together, and probes look at the device."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, assert_type

import httpx
import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import aiocuda
from aiocuda.pipeline import Slot
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.serving.asgi import CancelOnDisconnect, cancel_on_disconnect, error_responses, health, lifespan, ready

Row = npt.NDArray[np.float32]


async def double(batch: Batch[Row]) -> list[float]:
    assert_type(batch.items, list[Row])
    assert_type(batch.slot, Slot)
    assert_type(batch.stream, aiocuda.Stream)
    x = await batch.stream.upload(np.stack(batch.items))
    return [2 * float(row.sum()) for row in await batch.stream.download(x)]


async def either(batch: Batch[str]) -> list[int | BaseException]:
    return [int(item) if item.isdigit() else ValueError(item) for item in batch.items]


def words(item: str) -> int:
    return len(item.split())


async def untyped(batch: Batch) -> Any:
    return batch.items


@cancel_on_disconnect
async def endpoint(request: Request) -> Response:
    batcher: MicroBatcher[Row, float] = request.state.batcher
    row = np.array(await request.json(), np.float32)
    return JSONResponse(assert_type(await batcher.submit(row, priority="high", deadline_s=60), float))


@contextlib.asynccontextmanager
async def setup(app: Starlette) -> AsyncIterator[dict[str, MicroBatcher[Row, float]]]:
    async with aiocuda.open_device(driver="host") as device:
        app.add_route("/ready", ready(device))
        async with MicroBatcher(double, max_batch_size=64, device=device) as batcher:
            assert_type(batcher, MicroBatcher[Row, float])
            yield {"batcher": batcher}


app = Starlette(
    routes=[Route("/double", endpoint, methods=["POST"]), Route("/live", health)],
    middleware=[Middleware(CancelOnDisconnect), Middleware(error_responses)],
    lifespan=lifespan(setup),
)
app.add_route("/health", health)
app.mount("/probe", health)


async def submit() -> None:
    async with MicroBatcher(either, max_batch_size=8, weight=words) as batcher:
        assert_type(batcher, MicroBatcher[str, int])
        assert_type(batcher.submit_nowait("2"), asyncio.Future[int])
        assert await batcher.submit("3") == 3
    async with MicroBatcher(untyped, max_batch_size=8) as batches:
        assert_type(batches, MicroBatcher)
        assert_type(await batches.submit(3), Any)


async def main() -> None:
    await submit()
    async with app.router.lifespan_context(app) as state:

        async def with_state(
            scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
        ) -> None:
            await app({**scope, "state": dict(state or {})}, receive, send)

        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/double", json=[1, 2])).json() == 6.0
            for path in ("/health", "/live", "/probe/", "/ready"):
                assert (await client.get(path)).json() == {"status": "ok"}
