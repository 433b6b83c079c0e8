"""A service: a web application with handlers that await graphs of GPU work, under a deadline.

The application's lifespan opens the device, once. A handler builds its graph, and awaits the last operation under a
deadline. When the deadline passes, only that wait is cancelled: the device finishes the work that it has accepted, and
the memory returns to the pool after it. Starlette and uvicorn do not cancel a handler when its client disconnects: the
handler continues until its result or its deadline. The program below cancels some handlers itself, to show that a
cancellation leaks nothing.

It needs Starlette, and httpx for the client in this program: ``pip install starlette httpx``. To serve the application,
pass it to a server: ``app = make_app("auto")``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

import numpy as np

import aiocuda

SOURCE = """
extern "C" __global__ void square(float* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * x[i];
}
extern "C" __global__ void sum(float* out, const float* x, int n) {
    float total = 0;
    for (int i = 0; i < n; i++) total += x[i];
    out[0] = total;
}
"""

square = aiocuda.Kernel("square", source=SOURCE, host=lambda out, x, n: np.square(x[:n], out=out[:n]))
total = aiocuda.Kernel("sum", source=SOURCE, host=lambda out, x, n: out.__setitem__(0, x[:n].sum()))

#: Seconds that a client waits at most.
DEADLINE = 10.0


async def squared_norm(coordinator, numbers):
    """Upload, two kernels, download. The coordinator orders them by the buffers that they use."""
    count = len(numbers)
    up = coordinator.upload(numbers)
    squares, result = (coordinator.compute_stream.empty(size) for size in (count, 1))
    coordinator.compute(square, (count + 127) // 128, 128, squares, up, count, writes=[squares])
    coordinator.compute(total, 1, 1, result, squares, count, writes=[result])
    async with asyncio.timeout(DEADLINE):
        return float((await coordinator.download(result))[0])


def make_app(driver):
    """An ASGI application."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with aiocuda.open_device(driver=driver) as device:
            await asyncio.gather(device.load(square), device.load(total))  # no request waits for the compiler
            async with aiocuda.AsyncCoordinator(device) as coordinator:
                app.state.device, app.state.coordinator = device, coordinator
                yield

    async def norm(request):
        numbers = np.array(await request.json(), np.float32)
        try:
            return JSONResponse(await squared_norm(request.app.state.coordinator, numbers))
        except TimeoutError:
            return JSONResponse({"error": "the GPU is busy: try again later"}, status_code=503)

    return Starlette(lifespan=lifespan, routes=[Route("/norm", norm, methods=["POST"])])


async def main(driver):
    import httpx

    app = make_app(driver)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
    ):
        posts = [asyncio.create_task(client.post("/norm", json=[index, 1.0, 2.0])) for index in range(20)]
        await asyncio.sleep(0)
        for post in posts[::3]:
            post.cancel()  # without a server in between, this cancels the handler too
        answers = await asyncio.gather(*posts, return_exceptions=True)
        for index, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError) or answer.json() == index * index + 5.0
        await app.state.coordinator.drain()
        answered = sum(isinstance(answer, httpx.Response) for answer in answers)
        in_flight = app.state.device.statistics().in_flight
        print(f"{answered} answered, {len(posts) - answered} cancelled, {in_flight} in flight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a web application that computes on a GPU, and its clients")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    asyncio.run(main(parser.parse_args().driver))
