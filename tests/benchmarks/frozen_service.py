"""The row of ``lifespan(freeze=…)``, and the service that it measures, in a process of its own.

The service is Starlette and uvicorn around a `MicroBatcher`. Its model has six linear layers of 512 in half precision,
in PyTorch; without a GPU it is a copy, which shows that the row works. 128 connections are a closed loop. Two servers,
which differ in ``freeze`` alone, are measured in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

import aiocuda
from aiocuda.serving import Batch, MicroBatcher
from tests.load.client import Client
from tests.load.outcomes import Outcome
from tests.load.schedule import Phase, poisson

from .figures import Measured, percentile
from .machine import ROOT
from .setting import Setting

__all__ = ["QUANTILES", "service_freeze"]

WIDTH, LAYERS, MOST_IN_BATCH = 512, 6, 64

#: The percentiles of the latency in the report and in the picture.
QUANTILES = (1, 10, 25, 50, 75, 90, 95, 97, 98, 99, 99.5, 99.9)

#: Seconds until a server has answered, and until it has ended.
PATIENCE = 60.0


async def service_freeze(setting: Setting) -> Measured:
    """p99 of the latency in ms over HTTP with ``freeze=True``. Baseline: with ``freeze=False``. Bound: at most 0.35.

    The samples are those of a closed loop. ``p50_ratio`` compares its medians, which differed by 0.70 in one run and by
    1.38 in the next; the reason is not known. ``open_p50_ratio`` compares the medians of an open loop of Poisson
    arrivals, at a quarter of the closed loop's rate. Bounds: at most 1.0. The other figures are percentiles of both
    closed loops, and requests per second.
    """
    driver, seconds = setting.device.driver.name, setting.sizes["seconds"]
    measured, closed, opened = Measured([]), _Latencies(), _Latencies()
    rates: dict[bool, list[float]] = {True: [], False: []}
    medians = _Latencies()
    gc.disable()  # a collection would make the client late
    try:
        for repeat in range(setting.count("repeats")):
            for freeze, samples in ((True, measured.samples), (False, measured.baseline)):
                async with _serving(driver, freeze) as port:
                    found = await _closed_loop(port, setting.count("connections"), seconds)
                    if not found:
                        raise RuntimeError(f"no request began in {seconds} s after the warm-up: give it more seconds")
                    rates[freeze].append(len(found) / seconds)
                    offered = rates[True][0] / 4
                    opened[freeze] += await _open_loop(port, offered, setting.sizes["open_seconds"], seed=repeat)
                samples.append(percentile(found, 99))
                medians[freeze].append(percentile(found, 50))
                closed[freeze] += found
    finally:
        gc.enable()
    for freeze, name in ((True, "frozen"), (False, "unfrozen")):
        for quantile in QUANTILES:
            measured.figures[f"{name}_p{quantile:g}_ms"] = percentile(closed[freeze], quantile)
        measured.figures[f"{name}_longest_ms"] = max(closed[freeze])
        measured.figures[f"{name}_per_s"] = median(rates[freeze])
    measured.figures["p50_ratio"] = median(medians[True]) / median(medians[False])
    for quantile in (50, 99):
        ratio = percentile(opened[True], quantile) / percentile(opened[False], quantile)
        measured.figures[f"open_p{quantile}_ratio"] = ratio
    return measured


class _Latencies(dict[bool, list[float]]):
    """Latencies in ms, with and without freezing."""

    def __init__(self) -> None:
        super().__init__({True: [], False: []})


# -- the client ------------------------------------------------------------------------------------------------------


def _body(number: int) -> bytes:
    return np.full(WIDTH, number % 7, np.float16).tobytes()


def _request(number: int) -> bytes:
    body = _body(number)
    return b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _is_right(number: int, body: bytes) -> bool:
    return body == _body(number)


async def _closed_loop(port: int, connections: int, seconds: float) -> list[float]:
    """Return the latencies in ms, after a quarter of the time to warm up."""
    warm_up = seconds / 4
    async with Client(port, _request, _is_right, most_connections=connections) as client:
        return _latencies(await client.closed_loop(connections, warm_up + seconds), warm_up)


async def _open_loop(port: int, rate: float, seconds: float, seed: int) -> list[float]:
    """Return the latencies in ms, from the scheduled times on, after a quarter of the time to warm up."""
    warm_up = seconds / 4
    arrivals = poisson([Phase(rate, warm_up + seconds)], seed)
    async with Client(port, _request, _is_right) as client:
        return _latencies(await client.open_loop(arrivals, drain_s=5.0), warm_up)


def _latencies(outcomes: Sequence[Outcome], warm_up: float) -> list[float]:
    wrong = [outcome for outcome in outcomes if not outcome.is_accepted]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(outcomes)} requests failed, first {_problem(wrong[0])}")
    return [outcome.latency * 1e3 for outcome in outcomes if outcome.scheduled >= warm_up]


def _problem(outcome: Outcome) -> str:
    return outcome.problem or f"status {outcome.status}"


@contextlib.asynccontextmanager
async def _serving(driver: str, freeze: bool) -> AsyncIterator[int]:
    """Run the service in a process of its own; yield its port when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.benchmarks.frozen_service",
        driver,
        str(port),
        str(int(freeze)),
    ]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env={**os.environ, "PYTHONPATH": _path()})
    try:
        end = time.monotonic() + PATIENCE
        while True:
            async with Client(port, _request, _is_right) as client:
                (outcome,) = await client.open_loop([0.0], drain_s=5.0)
            if outcome.is_accepted:
                break
            if process.returncode is not None or time.monotonic() > end:
                raise RuntimeError(f"the service does not answer: {_problem(outcome)}, exit code {process.returncode}")
            await asyncio.sleep(0.05)
        yield port
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), PATIENCE)
            except TimeoutError:
                process.kill()
                await process.wait()


def _path() -> str:
    ours = [os.path.dirname(os.path.dirname(aiocuda.__file__)), str(ROOT)]
    return os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])


# -- the service -----------------------------------------------------------------------------------------------------


def _torch_model() -> Callable[[Batch[Any]], Any]:
    """Return the function for a batch, in PyTorch. The model returns its input: its weights are identities."""
    import torch

    from aiocuda.integrations import torch as on_gpu

    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        torch.nn.init.eye_(layer.weight)
    network = torch.nn.Sequential(*layers).half().cuda().eval().requires_grad_(False)
    network(torch.zeros((MOST_IN_BATCH, WIDTH), dtype=torch.float16, device="cuda"))
    torch.cuda.synchronize()

    async def infer(batch: Batch[Any]) -> Sequence[Any]:
        up = torch.from_numpy(np.asarray(batch.slot.pinned("up", (MOST_IN_BATCH, WIDTH), np.float16)))
        down = torch.from_numpy(np.asarray(batch.slot.pinned("down", (MOST_IN_BATCH, WIDTH), np.float16)))
        for row, item in enumerate(batch.items):
            up[row] = torch.frombuffer(item, dtype=torch.float16)

        def enqueue() -> None:
            down.copy_(network(up.to("cuda", non_blocking=True)), non_blocking=True)

        await on_gpu.submit(batch.stream, enqueue)
        return [row.tobytes() for row in down.numpy()[: batch.size]]

    return infer


def _copying_model() -> Callable[[Batch[Any]], Any]:
    """Return a function that sends a batch to the device and back."""

    async def infer(batch: Batch[Any]) -> Sequence[Any]:
        x = await batch.stream.upload(np.stack([np.frombuffer(item, np.float16) for item in batch.items]))
        return [row.tobytes() for row in await batch.stream.download(x)]

    return infer


def main(driver: Any, port: int, freeze: bool) -> None:
    """Serve until SIGTERM."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from aiocuda.serving.asgi import lifespan

    @contextlib.asynccontextmanager
    async def setup(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with aiocuda.open_device(driver=driver) as device:
            infer = _torch_model() if driver == "cuda" else _copying_model()
            async with MicroBatcher(
                infer, max_batch_size=MOST_IN_BATCH, max_concurrent_batches=2, device=device
            ) as batcher:
                yield {"batcher": batcher}

    async def predict(request: Request) -> Response:
        return Response(await request.state.batcher.submit(bytearray(await request.body())))

    app = Starlette(routes=[Route("/", predict, methods=["POST"])], lifespan=lifespan(setup, freeze=freeze))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.frozen_service")
    parser.add_argument("driver")
    parser.add_argument("port", type=int)
    parser.add_argument("freeze", type=int)
    given = parser.parse_args()
    main(given.driver, given.port, bool(given.freeze))
