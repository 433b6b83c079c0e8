"""The end of an object without unfinished work gives everything back in the call itself."""

from __future__ import annotations

import asyncio

import pytest

from aiocuda import Device
from tests.helpers import turns
from tests.lives import rows


@pytest.mark.asyncio
@pytest.mark.parametrize("worked", [False, True])
@pytest.mark.parametrize("name", ["Stream", "AsyncCoordinator", "Pipeline", "MicroBatcher"])
async def test_end_without_work_does_not_suspend(
    device: Device, name: str, worked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "HELD", 0.001)
    row = rows.ROWS[name]
    async with row.make(device) as life:
        if row.must_enter:
            await life.thing.__aenter__()
        if worked:
            await life.work()
            await turns(5)
        end = life.thing.aclose()
        with pytest.raises(StopIteration):
            end.send(None)
        with pytest.raises(row.ended):
            await life.thing.__aenter__()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["Stream", "AsyncCoordinator", "Pipeline", "MicroBatcher"])
async def test_end_with_work_waits_for_it(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "HELD", rows.SOON)
    row = rows.ROWS[name]
    async with row.make(device) as life:
        if row.must_enter:
            await life.thing.__aenter__()
        work = await life.begin()
        end = asyncio.ensure_future(life.thing.aclose())
        await turns(2)
        assert not end.done()
        await end
        await turns(2)
        assert work.done()
