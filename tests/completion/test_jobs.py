"""Jobs on the driver's threads whose waiter is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

import aiocuda
from tests.helpers import PATIENCE, Reports, quickly, until

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("error", [None, ValueError("why")])
async def test_failure_that_no_task_waits_for_any_more_is_reported_and_a_result_is_not(error: Exception | None) -> None:
    entered, gate = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert gate.wait(PATIENCE)
        if error is not None:
            raise error

    async with aiocuda.open_device(driver="host") as device:
        with Reports() as reports:
            waiting = asyncio.create_task(device.offload(work))
            await until(entered.is_set)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await quickly(waiting)
            gate.set()
            await quickly(device.drain())
            if error is not None:
                await until(lambda: reports.contexts, "the report")
            for _ in range(2):  # the loop has received the result of the job, too
                await quickly(device.offload(int))
        assert [(each["message"], each["exception"]) for each in reports.contexts] == [
            ("aiocuda: work failed unheard", error)
        ] * (error is not None)
