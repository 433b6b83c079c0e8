"""A service around a device on the host driver, for the tests with servers. It reports what it does on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import aiocuda
from aiocuda import Kernel
from aiocuda.serving.asgi import CancelOnDisconnect, error_responses, health, lifespan, ready
from aiocuda.testing import kernels

SPIN = Kernel(kernels.SPIN.name, source=kernels.SPIN.source, host=kernels.SPIN.host)
TRAP = Kernel(kernels.TRAP.name, source=kernels.TRAP.source, host=kernels.TRAP.host)

#: Bytes of a response that no socket buffer holds.
LARGE = 64 << 20

logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")  # for the logger of the library

counts = {"begun": 0, "cancelled": 0, "done": 0, "faulted": 0}
never = asyncio.Event()
background: set[asyncio.Task[None]] = set()


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def counted() -> AsyncIterator[None]:
    counts["begun"] += 1
    try:
        yield
    except asyncio.CancelledError:
        counts["cancelled"] += 1
        raise
    except aiocuda.DeviceFault:
        counts["faulted"] += 1
        raise
    counts["done"] += 1


async def wait(request: Request) -> Response:
    """Hold a stream until the client leaves."""
    await request.body()
    async with counted(), request.state.device.stream():
        await never.wait()
    return PlainTextResponse("never")


async def work(request: Request) -> Response:
    """Use the device for some milliseconds."""
    size = len(await request.body())
    number = request.query_params.get("number", "")
    report(f"begun {number}")
    async with counted(), request.state.device.stream() as stream:
        await stream.launch(SPIN, 1, 1, int(float(request.query_params["ms"]) * 1e6))
    return PlainTextResponse(f"{number} {size}")


async def on_device(request: Request) -> Response:
    """Wait for the device until it faults."""
    async with counted(), request.state.device.stream() as stream:
        for _ in range(1_000_000):
            await stream.launch(SPIN, 1, 1, 1_000_000)
    return PlainTextResponse("never")


async def fault(request: Request) -> Response:
    await request.body()
    async with counted(), request.state.device.stream() as stream:
        await stream.launch(TRAP, 1, 1)
    return PlainTextResponse("never")


async def fault_later(request: Request) -> Response:
    """Respond, and cause the fault after that."""
    await request.body()

    async def later() -> None:
        with contextlib.suppress(aiocuda.DeviceFault):
            await fault(request)

    return PlainTextResponse("later", background=BackgroundTask(later))


async def large(request: Request) -> Response:
    """Use the device, and return a large response."""
    async with counted(), request.state.device.stream() as stream:
        await stream.launch(SPIN, 1, 1, 1_000)
    return Response(bytes(LARGE))


async def thread(request: Request) -> Response:
    """Use the loop's own threads, as a route for metrics does."""
    return PlainTextResponse(await asyncio.to_thread(lambda: "thread"))


def pool(request: Request) -> Response:
    """Use a thread of the framework, as every function does that is no coroutine function."""
    return PlainTextResponse("pool")


async def thread_goes_on(request: Request) -> Response:
    """Begin work on a thread, and respond. The work ends when a file exists; without the name of a file, never."""
    begun, file = threading.Event(), request.query_params.get("until")

    def work() -> None:
        begun.set()
        while file is None or not os.path.exists(file):
            threading.Event().wait(0.01)
        report("thread ended")

    async def wait_for_thread() -> None:
        try:
            await asyncio.to_thread(work)
        except asyncio.CancelledError:
            report("loop ends")
            raise

    background.add(asyncio.create_task(wait_for_thread()))
    await asyncio.to_thread(begun.wait)
    return PlainTextResponse("begun")


async def count(request: Request) -> Response:
    return JSONResponse({**counts, "streams": request.state.device.statistics().streams, "pid": os.getpid()})


async def frozen(request: Request) -> Response:
    return JSONResponse({"pid": os.getpid(), "frozen": gc.get_freeze_count()})


@contextlib.asynccontextmanager
async def setup(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    async with aiocuda.open_device(driver="host") as device:
        await device.load(SPIN)
        await device.load(TRAP)
        app.add_route("/ready", ready(device))
        yield {"device": device}
        report(f"closes {counts}")
    report("closed")


app = Starlette(
    routes=[
        Route("/wait", wait, methods=["GET", "POST"]),
        Route("/work", work, methods=["GET", "POST"]),
        Route("/on_device", on_device),
        Route("/fault", fault, methods=["GET", "POST"]),
        Route("/fault_later", fault_later),
        Route("/large", large),
        Route("/thread", thread),
        Route("/pool", pool),
        Route("/thread_goes_on", thread_goes_on),
        Route("/count", count),
        Route("/frozen", frozen),
        Route("/health", health),
    ],
    middleware=[Middleware(CancelOnDisconnect), Middleware(error_responses)],
    lifespan=lifespan(setup, exit_on_fault=70),
)
