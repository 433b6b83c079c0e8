"""FastAPI and `batched`: an asynchronous batch processor, whose plain function runs in a thread."""

from __future__ import annotations

import batched
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ..setting import MOST_IN_BATCH, PATH, EmulatedDevice, Setting
from ._limit import Limit
from ._uvicorn import run


class Item(BaseModel):
    input: float


def serve(port: int, setting: Setting) -> None:
    app = FastAPI()
    app.add_middleware(Limit, most=setting.most_in_flight(setting.bound))
    device = EmulatedDevice(setting)
    compute = batched.aio.dynamically(device.compute, batch_size=MOST_IN_BATCH, timeout_ms=setting.wait_s * 1e3)

    @app.post(PATH)
    async def predict(item: Item) -> JSONResponse:
        return JSONResponse({"output": await compute(item.input)})

    run(app, port)
