"""Starlette and `aiocuda.serving.MicroBatcher`; the model is a kernel of the host driver.

Two batches at a time: while the device computes one, the next one is formed, uploaded and waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiocuda
from aiocuda.serving import Batch, DeadlineError, MicroBatcher, OverloadedError

from ..setting import MOST_IN_BATCH, PATH, EmulatedDevice, Setting
from ._uvicorn import run

CONCURRENT = 2
SOURCE = 'extern "C" __global__ void model(const float* x, float* y, int n) { /* not compiled here */ }'


def kernel(setting: Setting) -> aiocuda.Kernel:
    """Return the kernel of the model. Its host implementation computes on the emulated device, as the peers do."""
    device = EmulatedDevice(setting)

    def model(x: Any, y: Any, n: int) -> None:
        y[:n] = device.compute(x[:n])

    return aiocuda.Kernel("model", source=SOURCE, host=model)


def make_app(setting: Setting) -> Starlette:
    """Return the service."""
    model = kernel(setting)

    async def infer(batch: Batch[float]) -> list[float]:
        stream = batch.stream
        assert stream is not None
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
                max_concurrent_batches=CONCURRENT,
                max_queued_requests=setting.most_in_flight(setting.bound) - CONCURRENT * MOST_IN_BATCH,
                device=device,
            ) as batcher,
        ):
            yield {"batcher": batcher}

    async def predict(request: Request) -> JSONResponse:
        item = await request.json()
        try:
            output = await request.state.batcher.submit(item["input"], deadline_s=setting.server_deadline_s)
        except OverloadedError as error:
            return JSONResponse(None, 429, {"Retry-After": str(math.ceil(error.retry_after_s))})
        except DeadlineError:
            return JSONResponse(None, 504)
        return JSONResponse({"output": output})

    async def statistics(request: Request) -> JSONResponse:
        found = request.state.batcher.statistics()
        return JSONResponse({"fill": found.fill, "batches": found.batches, "missed_deadlines": found.missed_deadlines})

    return Starlette(
        lifespan=setup,
        routes=[Route(PATH, predict, methods=["POST"]), Route("/statistics", statistics)],
    )


def serve(port: int, setting: Setting) -> None:
    run(make_app(setting), port)
