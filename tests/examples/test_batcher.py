"""The batcher of docs/how-to/service.md answers every request, whatever ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import ClosedError, Device, DeviceFault
from tests.helpers import quickly, until
from tests.project.test_docs import BLOCKS

pytestmark = pytest.mark.asyncio


@pytest.fixture
def page() -> dict[str, Any]:
    """The page's names, without its last line, which runs the program."""
    code = next(block.code for block in BLOCKS if "class Batcher" in block.code)
    names: dict[str, Any] = {}
    exec(code.removesuffix("asyncio.run(main())\n"), names)
    return names


def requests(batcher: Any, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(batcher.score(np.full(3, index, np.float32))) for index in range(count)]


async def outcomes(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return await quickly(asyncio.gather(*tasks, return_exceptions=True))  # type: ignore[no-any-return]


async def test_every_request_gets_the_device_fault(page: dict[str, Any]) -> None:
    def fault(x: Any, y: Any, n: int) -> None:
        raise ZeroDivisionError

    page["squash"] = aiocuda.Kernel("squash", source=page["SOURCE"], host=fault)
    async with aiocuda.open_device(driver="host") as device:
        batcher = page["Batcher"](device, width=3, most=4)

        async def serve() -> None:
            async with batcher.running():
                tasks.extend(requests(batcher, 16))
                await asyncio.Event().wait()

        tasks: list[asyncio.Task[Any]] = []
        with pytest.raises(ExceptionGroup) as caught:  # one fault for each worker that was computing
            await quickly(serve())
        assert {type(error) for error in caught.value.exceptions} == {DeviceFault}
        assert [type(outcome) for outcome in await outcomes(tasks)] == [DeviceFault] * 16
        with pytest.raises(DeviceFault):
            await quickly(batcher.score(np.zeros(3, np.float32)))


async def test_requests_fail_when_the_block_is_left(page: dict[str, Any], device: Device) -> None:
    batcher = page["Batcher"](device, width=3, most=4)
    async with batcher.running():
        tasks = requests(batcher, 16)
        await until(lambda: batcher.waiting.qsize() > 0, "the requests")
    for outcome in await outcomes(tasks):
        assert isinstance(outcome, ClosedError | np.ndarray)
    with pytest.raises(ClosedError, match="closed"):
        await quickly(batcher.score(np.zeros(3, np.float32)))


async def test_requests_fail_when_compute_has_a_bug(page: dict[str, Any], device: Device) -> None:
    async def compute(stream: Any, rows: Any) -> Any:
        raise ZeroDivisionError

    batcher = page["Batcher"](device, width=3, most=4)
    batcher.compute = compute
    tasks: list[asyncio.Task[Any]] = []

    async def serve() -> None:
        async with batcher.running():
            tasks.extend(requests(batcher, 16))
            await asyncio.Event().wait()

    with pytest.RaisesGroup(ZeroDivisionError):
        await quickly(serve())
    assert [type(outcome) for outcome in await outcomes(tasks)] == [ClosedError] * 16


async def test_a_full_queue_refuses_a_request(page: dict[str, Any], device: Device) -> None:
    batcher = page["Batcher"](device, width=3, most=1)
    tasks = requests(batcher, 5)  # no worker runs yet
    await asyncio.sleep(0)
    with pytest.raises(asyncio.QueueFull):
        await tasks[4]
    async with batcher.running():
        assert [outcome[0] for outcome in await outcomes(tasks[:4])] == pytest.approx(np.tanh(range(4)))
