"""The number of Python calls of each hot path. `docs/explanation/host-time.md` has the table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from aiocuda import open_device
from aiocuda.data import DataLoader

from .steps import Steps, count_steps

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "host-time.md"

MOST = {
    "copy from pinned memory": 4,
    "launch": 4,
    "empty and free": 16,
    "submit": 15,
    "submit of one of many": 33,
    "coordinator.compute": 22,
    "upload of a small array": 20,
    "item of three stages": 58,
    "request of a batcher": 82,
}
MOST_OF_A_BATCH = 142


@pytest.mark.python_core
@pytest.mark.asyncio
async def test_hot_paths_make_at_most_so_many_calls() -> None:
    counted: dict[str, int] = {}
    for _ in range(20):  # a busy machine adds calls: the timers of the event loop run
        for name, (steps, times) in (await count_steps()).items():
            calls = int(steps.total / times)
            if name == "upload of a small array":
                assert len({file for file, _ in steps.calls}) <= 12
            counted[name] = min(calls, counted.get(name, calls))
        if all(calls <= MOST[name] for name, calls in counted.items()):
            break
    assert counted.keys() == MOST.keys()
    for name, calls in counted.items():
        assert calls <= MOST[name], name


@pytest.mark.python_core
@pytest.mark.asyncio
async def test_batch_of_a_loader_makes_at_most_so_many_calls() -> None:
    """On the loop's thread. How often the consumer waits for the threads changes the number by ten."""
    samples, fewest = np.ones((1600, 4), np.float32), float("inf")
    async with open_device(driver="host") as device:
        for _ in range(20):
            async with DataLoader(device, samples, fields={"x": ((4,), "f4")}, batch_size=4) as loader:
                batches = aiter(loader)
                for _ in range(100):
                    await anext(batches)
                with Steps() as steps:
                    for _ in range(200):
                        await anext(batches)
            fewest = min(fewest, steps.total / 200)
            if fewest <= MOST_OF_A_BATCH:
                break
    assert fewest <= MOST_OF_A_BATCH


def test_the_page_has_these_numbers() -> None:
    rows = re.findall(r"^\| ([a-z. ]+) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: int(calls) for name, calls in rows} == MOST
