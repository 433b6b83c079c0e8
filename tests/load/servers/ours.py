"""Starlette and `aiocuda.serving.MicroBatcher`; the model is a kernel of the host driver.

Two batches at a time: while the device computes one, the next one is formed, uploaded and waits for the device. This
has the highest capacity. At a low load, a request that arrives during a batch waits for two: see `ours_one`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiocuda
from aiocuda.serving import Batch, MicroBatcher
from aiocuda.serving.asgi import error_responses, lifespan

from ..setting import MOST_IN_BATCH, PATH, EmulatedDevice, Setting
from ._uvicorn import run

SOURCE = 'extern "C" __global__ void model(const float* x, float* y, int n) { /* not compiled here */ }'


def kernel(setting: Setting) -> aiocuda.Kernel:
    """Return the kernel of the model. Its host implementation computes on the emulated device, as the peers do."""
    device = EmulatedDevice(setting)

    def model(x: Any, y: Any, n: int) -> None:
        y[:n] = device.compute(x[:n])

    return aiocuda.Kernel("model", source=SOURCE, host=model)


def make_app(setting: Setting, concurrent: int) -> Starlette:
    """Return the service, with so many batches at a time."""
    model = kernel(setting)

    async def infer(batch: Batch[float]) -> list[float]:
        stream = batch.stream
        x, y = stream.empty(batch.size), stream.empty(batch.size)
        stream.copy(x, np.array(batch.items, np.float32))
        stream.launch(model, 1, batch.size, x, y, batch.size)
        found: list[float] = (await stream.download(y)).tolist()
        return found

    @contextlib.asynccontextmanager
    async def setup(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with (
            aiocuda.open_device(driver="host") as device,
            MicroBatcher(
                infer,
                max_batch_size=MOST_IN_BATCH,
                batch_wait_timeout_s=setting.wait_s,
                max_concurrent_batches=concurrent,
                max_queued_requests=setting.most_in_flight(setting.bound) - concurrent * MOST_IN_BATCH,
                device=device,
            ) as batcher,
        ):
            yield {"batcher": batcher}

    async def predict(request: Request) -> JSONResponse:
        item = await request.json()
        output = await request.state.batcher.submit(item["input"], deadline_s=setting.server_deadline_s)
        return JSONResponse({"output": output})

    return Starlette(
        lifespan=lifespan(setup),
        middleware=[Middleware(error_responses)],
        routes=[Route(PATH, predict, methods=["POST"])],
    )


def serve(port: int, setting: Setting) -> None:
    run(make_app(setting, concurrent=2), port)
