"""Ctrl-C and refusals in the middle of a submission: an operation is with the device, or it is not (P2, P6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import DriverError, EventPool, Kernel, SkippedError
from aiocuda.testing import Latch
from aiocuda.testing.kernels import HOLD
from tests.helpers import PATIENCE, Peer, Reports, open_peer, quickly, until


class Notebook:
    """A loop that an interrupt leaves, and that goes on."""

    def __init__(self) -> None:
        self.peer = Peer()
        self.loop = asyncio.new_event_loop()

    def run(self, cell: Any) -> Any:
        return self.loop.run_until_complete(cell)

    def interrupted(self, cell: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.run(cell)


@pytest.mark.parametrize("what", ["call", "activate"])
def test_queued_operation_is_not_done_if_it_was_never_called(what: str) -> None:
    notebook = Notebook()
    kept: list[Any] = []

    async def first() -> None:
        device = await aiocuda.open_device(driver=notebook.peer.driver, max_in_flight=1)
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        latch = Latch(device)
        latch.hold(stream)
        await latch.held()
        filling = stream.fill(buffer, 1.0)
        behind = stream.synchronize()
        assert filling.state == "queued"
        kept.extend((device, stream, buffer, filling, behind, latch))
        if what == "call":
            notebook.peer.refuse("fill", error=KeyboardInterrupt)
        else:
            stream._lane.active = False
            stream._lane.reactor.__dict__["activate"] = _once(stream._lane.reactor)

    notebook.run(first())
    device, stream, buffer, filling, behind, latch = kept

    async def interrupted() -> None:
        latch.release()  # and not before: the interrupt is to come in here
        await quickly(filling)

    notebook.interrupted(interrupted())

    async def second() -> None:
        if what == "call":
            with pytest.raises(DriverError, match="interrupted on its way"):
                await quickly(filling)
            with pytest.raises(SkippedError):
                await quickly(behind)
            assert (await quickly(stream.download(buffer)) == 0).all()
        else:  # it had not come to its place: it is tried again
            await quickly(filling)
            await quickly(behind)
            assert (await quickly(stream.download(buffer)) == 1).all()
        assert device.statistics().in_flight == 0
        await device.aclose()

    notebook.run(second())
    notebook.loop.close()
    assert notebook.peer.inner.statistics()["events"] == 0


def _once(reactor: Any) -> Callable[[Any], None]:
    def activate(lane: Any) -> None:
        del reactor.__dict__["activate"]
        raise KeyboardInterrupt

    return activate


@pytest.mark.asyncio
async def test_memory_is_held_while_nobody_knows_whether_the_device_has_the_work() -> None:
    """P6: the interrupt came out of the call; the device had the kernel all the same."""
    async with open_peer() as (peer, device):
        stream = device.stream()
        words = device.pinned(2, "u4")
        words[:] = 0
        await words
        hold = Kernel(HOLD.name, source=HOLD.source, host=HOLD.host)
        await device.load(hold)
        launcher = peer.inner.launcher

        def interrupting(*arguments: Any) -> Callable[..., None]:
            enqueue = launcher(*arguments)

            def launch(values: Any) -> None:
                enqueue(values)
                raise KeyboardInterrupt

            return launch

        peer.__dict__["launcher"] = interrupting
        with Reports() as reports, pytest.raises(KeyboardInterrupt):
            stream.launch(hold, 1, 1, words, int(PATIENCE * 1e9))
        del peer.__dict__["launcher"]
        skipped = stream.synchronize()
        held = stream._lane.pending[0]
        wakes = device.statistics().watchdog_wakes
        await until(lambda: device.statistics().watchdog_wakes > wakes + 2, "the watchdog")
        assert not held.done()
        assert held._keep is not None
        words[:] = 1
        with pytest.raises(SkippedError):
            await quickly(skipped)
        assert isinstance(held.exception(), DriverError)
        assert await quickly(stream.synchronize()) is None
        assert not reports.contexts


# Events


@pytest.mark.asyncio
@pytest.mark.parametrize("timing", [None, False, True])
async def test_event_that_cannot_be_recorded_goes_back(timing: bool | None) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        await stream.fill(buffer, 0)

        class Listener:
            def on_submit(self, operation: Any) -> None: ...

            def on_resolve(self, operation: Any, start: int, end: int) -> None: ...

        Listener.timing = timing  # type: ignore[attr-defined]

        async def refused() -> None:
            for _ in range(20):
                peer.refuse("event_record")
                with pytest.raises(DriverError):
                    await quickly(stream.fill(buffer, 1))

        if timing is None:
            await refused()
        else:
            with device.listen(Listener()):  # type: ignore[arg-type]  # it has `timing`
                await refused()
        await quickly(stream.synchronize())
        assert device.statistics().events <= 5


@pytest.mark.asyncio
async def test_event_that_could_not_be_recorded_anew_proves_nothing() -> None:
    """P2: it still stands where it was recorded before, and says of what it was to stand behind that it is done."""
    async with open_peer() as (peer, device):
        stream, other = device.stream(), device.stream()
        event = EventPool(device).acquire_nowait()
        await other.record(event=event)
        with Latch(device) as latch:
            hold = latch.hold(stream)
            await latch.held()
            peer.refuse("event_record")
            again = stream.record(event=event)
            wakes = device.statistics().watchdog_wakes
            await until(lambda: device.statistics().watchdog_wakes > wakes + 2, "the watchdog")
            assert not hold.done()
            latch.release()
            assert await quickly(hold) is None
            with pytest.raises(DriverError):
                await quickly(again)
