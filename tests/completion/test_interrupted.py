"""Ctrl-C and refusals in the middle of a submission: an operation is with the device, or it is not (P2, P6)."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import Device, DrainTimeoutWarning, DriverError, EventPool, Kernel, Pipeline, SkippedError, Stage
from aiocuda.completion._reactor import Reactor
from aiocuda.testing import Latch
from aiocuda.testing._kernels import HOLD
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
def test_queued_operation_is_not_done_if_it_was_never_called(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
            stream._queue.active = False
            monkeypatch.setattr(Reactor, "activate", _once(monkeypatch))

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


def _once(patch: pytest.MonkeyPatch) -> Callable[[Reactor, Any], None]:
    def activate(reactor: Reactor, queue: Any) -> None:
        patch.undo()
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
        held = stream._queue.pending[0]
        wakes = device.statistics().watchdog_wakes
        await until(lambda: device.statistics().watchdog_wakes > wakes + 2, "the watchdog")
        assert not held.done()
        assert held.keep is not None
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


# The end of a device


async def held_for_ever(device: Device, latch: Latch, beside: str) -> None:
    """In the middle of what ends with blocks of its own when it is cancelled."""
    if beside == "pipeline":
        stages = [Stage("fill", lambda slot: slot.stream.fill(slot.buffer("x", 4), 1))]
        stages.append(Stage("hold", lambda slot: latch.hold(slot.stream)))
        async for _ in Pipeline(device, stages).run(range(5)):
            pass
    elif beside == "pinned array":
        async with device.pin(np.zeros(4, np.float32)) as pinned, device.stream() as stream:
            latch.hold(stream)
            stream.copy(stream.empty(4), pinned)
            await asyncio.Event().wait()
    else:
        stream = device.stream()
        await latch.hold(stream)


def left_by_two_interrupts(within: str, beside: str = "nothing") -> Device:
    """A device whose block a cancellation leaves, as the first Ctrl-C under `asyncio.run` does; then the second."""
    notebook = Notebook()
    kept: list[Any] = []

    async def block() -> None:
        async with aiocuda.open_device(driver=notebook.peer.driver) as device:
            kept.append(device)
            device.drain_timeout = PATIENCE
            latch = Latch(device, seconds=60)
            kept.append(latch)
            try:
                await held_for_ever(device, latch, beside)
            except asyncio.CancelledError:
                if within == "the block":
                    raise KeyboardInterrupt from None
                if within == "the wait":
                    notebook.peer.refuse("event_record", error=KeyboardInterrupt)
                raise

    async def interrupt() -> None:
        task = asyncio.create_task(block())
        await until(lambda: len(kept) == 2 and kept[1].running, "the hold")
        task.cancel()
        if within == "the loop":
            for _ in range(100):  # turns, in which whatever waits for the end begins to
                await asyncio.sleep(0)
            raise KeyboardInterrupt
        await asyncio.wait({task})

    async def end() -> None:
        """What `asyncio.run` does with what it finds."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await quickly(asyncio.gather(*tasks, return_exceptions=True))

    began = notebook.loop.time()
    notebook.interrupted(interrupt())
    notebook.run(end())
    assert notebook.loop.time() - began < PATIENCE
    notebook.loop.close()
    kept[1]._open()
    notebook.peer.inner.close()  # which a device that was left at work keeps for good
    return device_of(kept)


def device_of(kept: list[Any]) -> Device:
    device: Device = kept[0]
    return device


@pytest.mark.parametrize("within", ["the block", "the wait", "the loop"])
def test_second_interrupt_waits_for_nothing(within: str) -> None:
    """P10: the device is left at work, and the interpreter's exit does not wait for it either."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DrainTimeoutWarning)
        device = left_by_two_interrupts(within)
    assert device.closed
    if within != "the wait":  # whose failure is told instead
        (told,) = (str(each.message) for each in caught if each.category is DrainTimeoutWarning)
        assert "did not finish before the wait was interrupted" in told


@pytest.mark.parametrize("beside", ["pipeline", "pinned array"])
def test_second_interrupt_waits_for_none_of_the_blocks_in_a_device(beside: str) -> None:
    """Each of them waits for the device by itself, and each begins to when the one before it is told to stop."""
    with pytest.warns(DrainTimeoutWarning, match="before the wait was interrupted"):
        device = left_by_two_interrupts("the loop", beside)
    assert device.closed
