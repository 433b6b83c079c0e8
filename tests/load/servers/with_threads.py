"""FastAPI, and one call of `asyncio.to_thread` for each request: no batches."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ..setting import PATH, EmulatedDevice, Setting
from ._limit import Limit
from ._uvicorn import run


class Item(BaseModel):
    input: float


def serve(port: int, setting: Setting) -> None:
    app = FastAPI()
    app.add_middleware(Limit, most=setting.most_in_flight(1 / setting.batch_seconds(1)))
    device = EmulatedDevice(setting)

    @app.post(PATH)
    async def predict(item: Item) -> JSONResponse:
        (output,) = await asyncio.to_thread(device.compute, [item.input])
        return JSONResponse({"output": output})

    run(app, port)
