"""Ctrl-C and refusals during a submission: the device has either accepted an operation or not (P2, P6)."""

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
from aiocuda.testing.kernels import HOLD
from tests.helpers import LATCH, PATIENCE, Latch, Peer, Reports, open_peer, quickly, until


class Notebook:
    """An event loop that continues after a `KeyboardInterrupt`, as that of a notebook."""

    def __init__(self) -> None:
        self.peer = Peer()
        self.loop = asyncio.new_event_loop()

    def run(self, cell: Any) -> Any:
        return self.loop.run_until_complete(cell)

    def interrupted(self, cell: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.run(cell)


@pytest.mark.parametrize("place", ["call", "activate"])
def test_queued_operation_with_an_interrupted_call_is_not_done(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        later = stream.synchronize()
        assert filling.state == "queued"
        kept.extend((device, stream, buffer, filling, later, latch))
        if place == "call":
            notebook.peer.refuse("fill", error=KeyboardInterrupt)
        else:
            stream._queue.set_active(False)
            monkeypatch.setattr(Reactor, "activate", _once(monkeypatch))

    notebook.run(first())
    device, stream, buffer, filling, later, latch = kept

    async def interrupted() -> None:
        latch.release()  # only now, so that the interrupt comes in this cell
        await filling  # in this task: an interrupt in one of `wait_for` would come again in the next cell

    notebook.interrupted(interrupted())

    async def second() -> None:
        if place == "call":
            with pytest.raises(DriverError, match="interrupted on its way"):
                await quickly(filling)
            with pytest.raises(SkippedError):
                await quickly(later)
            assert (await quickly(stream.download(buffer)) == 0).all()
        else:  # the call was not reached, so the operation is submitted again
            await quickly(filling)
            await quickly(later)
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
async def test_memory_is_held_while_an_interrupted_kernel_may_run() -> None:
    """P6: the driver accepted the kernel, and its call then raised the interrupt."""
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
async def test_event_is_returned_if_its_record_is_refused(timing: bool | None) -> None:
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
            with device.listen(Listener()):
                await refused()
        await quickly(stream.synchronize())
        assert device.statistics().events <= 5


@pytest.mark.asyncio
async def test_event_with_a_refused_second_record_does_not_resolve_earlier_work() -> None:
    """P2: the event keeps its first record, in another stream. That record is done, but the held kernel is not."""
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


async def hold_stream(device: Device, latch: Latch, block_kind: str) -> None:
    """Hold a stream in a pipeline, in a block of a pinned array, or in neither. A cancellation ends that block."""
    if block_kind == "pipeline":
        stages = [Stage("fill", lambda slot: slot.stream.fill(slot.buffer("x", 4), 1))]
        stages.append(Stage("hold", lambda slot: latch.hold(slot.stream)))
        async for _ in Pipeline(device, stages).run(range(5)):
            pass
    elif block_kind == "pinned array":
        async with device.pin(np.zeros(4, np.float32)) as pinned, device.stream() as stream:
            latch.hold(stream)
            stream.copy(stream.empty(4), pinned)
            await asyncio.Event().wait()
    else:
        stream = device.stream()
        await latch.hold(stream)


def interrupt_twice(within: str, block_kind: str = "nothing") -> Device:
    """Leave the block of a device by two interrupts, and return the device.

    The first one cancels the task, as Ctrl-C under `asyncio.run` does. The second one comes in the place ``within``.
    """
    notebook = Notebook()
    kept: list[Any] = []

    async def block() -> None:
        async with aiocuda.open_device(driver=notebook.peer.driver) as device:
            kept.append(device)
            device.drain_timeout = LATCH
            latch = Latch(device)
            kept.append(latch)
            try:
                await hold_stream(device, latch, block_kind)
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
            for _ in range(100):  # iterations in which the blocks begin to wait for their end
                await asyncio.sleep(0)
            raise KeyboardInterrupt
        await asyncio.wait({task})

    async def end() -> None:
        """Cancel the remaining tasks, as `asyncio.run` does."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await quickly(asyncio.gather(*tasks, return_exceptions=True))

    start = notebook.loop.time()
    notebook.interrupted(interrupt())
    notebook.run(end())
    assert notebook.loop.time() - start < device_of(kept).drain_timeout
    notebook.loop.close()
    kept[1]._open()
    notebook.peer.inner.close()  # a device that was left while it worked keeps its driver open
    return device_of(kept)


def device_of(kept: list[Any]) -> Device:
    device: Device = kept[0]
    return device


@pytest.mark.parametrize("within", ["the block", "the wait", "the loop"])
def test_second_interrupt_ends_the_wait_for_the_device(within: str) -> None:
    """P10: the device is left while it works. The exit of the interpreter does not wait for it either."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DrainTimeoutWarning)
        device = interrupt_twice(within)
    assert device.closed
    if within != "the wait":  # there, the failure of the wait is reported instead
        (message,) = (str(each.message) for each in caught if each.category is DrainTimeoutWarning)
        assert "did not finish before the wait was interrupted" in message


@pytest.mark.parametrize("block_kind", ["pipeline", "pinned array"])
def test_second_interrupt_ends_the_waits_of_nested_blocks(block_kind: str) -> None:
    """Each block waits for the device itself, and begins to wait when the block inside it has been cancelled."""
    with pytest.warns(DrainTimeoutWarning, match="before the wait was interrupted"):
        device = interrupt_twice("the loop", block_kind)
    assert device.closed
