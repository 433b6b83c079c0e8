"""Endpoints with annotations as strings, as most modules of users have them."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic
from fastapi import Depends, FastAPI, Request
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from aiocuda.serving.asgi import cancel_on_disconnect


class Work:
    """The waits of the endpoints of one test."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.release = asyncio.Event()
        self.ended: list[str] = []
        self.bodies: list[bytes] = []

    async def do(self) -> None:
        self.begun.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("done")


class Item(pydantic.BaseModel):
    text: str


def starlette_app(work: Work, **options: Any) -> Starlette:
    @cancel_on_disconnect
    async def plain(request: Request) -> PlainTextResponse:
        work.bodies.append(await request.body())
        await work.do()
        return PlainTextResponse("done")

    @cancel_on_disconnect
    async def unnamed(it):  # type: ignore[no-untyped-def]
        await work.do()
        return PlainTextResponse("done")

    class Endpoint(HTTPEndpoint):
        @cancel_on_disconnect
        async def get(self, request: Request) -> PlainTextResponse:
            await work.do()
            return PlainTextResponse("done")

    routes = [
        Route("/plain", plain, methods=["GET", "POST"]),
        Route("/unnamed", unnamed),
        Route("/class", Endpoint),
    ]
    return Starlette(routes=routes, **options)


def fastapi_app(work: Work, **options: Any) -> FastAPI:
    app = FastAPI(**options)

    async def body_of(request: Request) -> bytes:
        return await request.body()

    @app.get("/plain")
    @cancel_on_disconnect
    async def plain(request: Request, q: int = 0) -> dict[str, int]:
        await work.do()
        return {"q": q}

    @app.post("/item")
    @cancel_on_disconnect
    async def item(item: Item, http: Request) -> Item:
        work.bodies.append(await http.body())
        await work.do()
        return item

    @app.post("/dependency")
    @cancel_on_disconnect
    async def dependency(*, request: Request, body: bytes = Depends(body_of)) -> dict[str, int]:
        work.bodies.append(body)
        await work.do()
        return {"size": len(body)}

    return app
