"""FastAPI and `batched`: an asynchronous batch processor, whose plain function runs in a thread."""

from __future__ import annotations

import batched
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ..setting import BOUND, MOST_IN_BATCH, PATH, WAIT_S, EmulatedDevice, most_in_flight
from ._limit import Limit
from ._uvicorn import run


class Item(BaseModel):
    input: float


def serve(port: int) -> None:
    app = FastAPI()
    app.add_middleware(Limit, most=most_in_flight(BOUND))
    compute = batched.aio.dynamically(EmulatedDevice().compute, batch_size=MOST_IN_BATCH, timeout_ms=WAIT_S * 1e3)

    @app.post(PATH)
    async def predict(item: Item) -> JSONResponse:
        return JSONResponse({"output": await compute(item.input)})

    run(app, port)
