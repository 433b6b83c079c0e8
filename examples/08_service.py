"""A web service: the requests of many clients are computed in batches, under deadlines.

The lifespan opens the device and a `MicroBatcher`. Each request submits one row and awaits its score; rows that arrive
within two milliseconds share one copy and one launch. A request is refused if too many wait (429) or if its deadline
cannot be met (504), and its row leaves the queue if its client disconnects. The program below has clients that leave.

It needs Starlette, and httpx for the clients in this program: ``pip install starlette httpx``. To serve the
application, save it as ``service.py``, add ``app = make_app("auto")``, and run
``uvicorn service:app --timeout-graceful-shutdown 10``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

import numpy as np

import aiocuda
from aiocuda.serving import MicroBatcher
from aiocuda.serving.asgi import CancelOnDisconnect, error_responses, health, lifespan, ready

ROWS, WIDTH = 32, 3

SOURCE = """
extern "C" __global__ void norms(float* out, const float* x, int rows, int width) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float total = 0;
    for (int i = 0; i < width; i++) total += x[row * width + i] * x[row * width + i];
    out[row] = total;
}
"""


def norms_on_host(out, x, rows, width):
    out[:rows] = np.square(x.reshape(-1, width)[:rows]).sum(axis=1)


norms = aiocuda.Kernel("norms", source=SOURCE, host=norms_on_host)


async def squared_norms(batch):
    """Compute a batch of rows: one upload, one kernel, one download. The memory of the slot is used by each batch."""
    rows = batch.slot.pinned("rows", (ROWS, WIDTH))
    rows[: batch.size] = batch.items
    x, out = batch.slot.buffer("x", (ROWS, WIDTH)), batch.slot.buffer("out", ROWS)
    batch.stream.copy(x, rows)
    batch.stream.launch(norms, 1, ROWS, out, x, batch.size, WIDTH)
    return (await batch.stream.download(out))[: batch.size].tolist()


def make_app(driver, deadline_s=2.0):
    """An ASGI application."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    @contextlib.asynccontextmanager
    async def setup(app):
        async with aiocuda.open_device(driver=driver) as device:
            await device.load(norms)  # no request waits for the compiler
            app.add_route("/ready", ready(device))
            async with MicroBatcher(
                squared_norms, max_batch_size=ROWS, max_queued_requests=256, device=device
            ) as batcher:
                app.state.device = device
                app.state.batcher = batcher
                yield

    async def norm(request):
        try:
            row = np.array(await request.json(), np.float32).reshape(WIDTH)
        except (TypeError, ValueError, OverflowError):
            row = None
        if row is None or not np.isfinite(row).all():  # one bad row must not fail the batch of others; null becomes NaN
            return JSONResponse({"detail": f"a row has {WIDTH} numbers"}, status_code=422)
        return JSONResponse(await request.app.state.batcher.submit(row, deadline_s=deadline_s))

    return Starlette(
        routes=[Route("/norm", norm, methods=["POST"]), Route("/health", health)],
        middleware=[Middleware(CancelOnDisconnect), Middleware(error_responses)],
        lifespan=lifespan(setup, exit_on_fault=70),
    )


async def main(driver):
    import httpx

    app = make_app(driver, deadline_s=60.0)  # on a busy machine, 200 requests at once may take longer than 2 s
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
    ):
        posts = [asyncio.create_task(client.post("/norm", json=[index, 1.0, 2.0])) for index in range(200)]
        await asyncio.sleep(0)
        for post in posts[::3]:
            post.cancel()  # without a server in between, this cancels the handler too
        answers = await asyncio.gather(*posts, return_exceptions=True)
        for index, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError) or answer.json() == index * index + 5.0
        answered = sum(isinstance(answer, httpx.Response) for answer in answers)
        batches = app.state.batcher.statistics().batches
        in_flight = app.state.device.statistics().in_flight
        print(f"{answered} answered in {batches} batches, {len(posts) - answered} cancelled, {in_flight} in flight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a web application that computes on a GPU, and its clients")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    driver = parser.parse_args().driver
    try:
        asyncio.run(main(driver))
    except ModuleNotFoundError as missing:
        if missing.name not in ("httpx", "starlette"):
            raise
        raise SystemExit(f"this example needs {missing.name}: pip install starlette httpx") from None
