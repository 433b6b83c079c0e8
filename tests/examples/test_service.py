"""The example of a service, with many clients of which a third leaves."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.serving import MicroBatcher
from aiocuda.testing import SimulatedLoop
from tests.helpers import LATCH, PATIENCE, quickly
from tests.project.tree import ROOT

REQUESTS = 200


@pytest.fixture(scope="module")
def service() -> ModuleType:
    spec = importlib.util.spec_from_file_location("service", ROOT / "examples" / "08_service.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def live_bytes(device: aiocuda.Device, ask: Callable[[], Awaitable[Any]]) -> int:
    """Live bytes after one more request: the next allocation releases dropped memory."""
    await asyncio.sleep(0)  # the loop still holds what this task was woken by
    gc.collect()
    await ask()
    return device.memory.statistics().live_bytes


@pytest.mark.asyncio
async def test_disconnecting_clients_leak_nothing(service: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx  # here, because GPU tests must not need more packages than the library

    quick = service.norms.host
    gone_away = threading.Event()  # else some are answered before they go

    def norms(out: Any, x: Any, rows: int, width: int) -> None:
        gone_away.wait(LATCH)
        quick(out, x, rows, width)

    monkeypatch.setattr(service, "norms", aiocuda.Kernel("norms", source=service.SOURCE, host=norms))
    app = service.make_app("host", deadline_s=PATIENCE)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
    ):
        device: aiocuda.Device = app.state.device
        batcher: MicroBatcher[Any, float] = app.state.batcher

        async def ask() -> None:
            assert (await client.post("/norm", json=[3.0, 4.0, 0.0])).json() == 25.0

        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/norm", json=[1.0])).status_code == 422
        gone_away.set()
        await ask()
        baseline = await live_bytes(device, ask)
        gone_away.clear()
        posts = [asyncio.create_task(client.post("/norm", json=[index, 1.0, 0.0])) for index in range(REQUESTS)]
        gone = posts[::10] + posts[3::10] + posts[7::10]
        assert len(gone) == 0.3 * REQUESTS
        for turn in range(6):  # at different points of their requests
            await asyncio.sleep(0)
            for post in gone[turn::6]:
                post.cancel()
        gone_away.set()
        answers = await quickly(asyncio.gather(*posts, return_exceptions=True))
        for index, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError) or answer.json() == index * index + 1.0
        assert sum(isinstance(answer, asyncio.CancelledError) for answer in answers) == 0.3 * REQUESTS
        found = batcher.statistics()
        assert (found.queued, found.running, found.failed) == (0, 0, 0)
        assert device.statistics().in_flight == 0
        del posts, gone, post, answers, answer  # their tracebacks hold what the handlers had
        assert await live_bytes(device, ask) <= baseline


async def crowd(service: ModuleType, device: aiocuda.Device) -> None:
    """The same without a web framework, which a GPU machine may lack."""
    batcher: MicroBatcher[Any, float]
    async with MicroBatcher(service.squared_norms, max_batch_size=service.ROWS, device=device) as batcher:

        async def norm(x: float, y: float) -> float:
            return await batcher.submit(np.array([x, y, 0.0], np.float32))

        async def ask() -> None:
            assert await norm(3.0, 4.0) == 25.0

        await ask()
        baseline = await live_bytes(device, ask)
        tasks = [asyncio.create_task(norm(index, 1.0)) for index in range(REQUESTS)]
        for turn in range(4):
            await asyncio.sleep(0)
            for task in tasks[3 * turn :: 12]:
                task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for index, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError) or answer == index * index + 1.0
        assert device.statistics().in_flight == 0
        del tasks, task, answers, answer  # their tracebacks hold what the callers had
        assert await live_bytes(device, ask) <= baseline


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_callers_that_are_cancelled(service: ModuleType, driver: Any) -> None:
    async with aiocuda.open_device(driver=driver) as device:
        await quickly(crowd(service, device))


@pytest.mark.parametrize("seed", range(5))
def test_callers_that_are_cancelled_in_virtual_time(service: ModuleType, seed: int) -> None:
    async def main() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(seed)) as device:
            await crowd(service, device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
