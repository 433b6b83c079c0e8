"""Tests each cell of the table in docs/explanation/boundaries.md: which object may be used where."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import pipeline
from aiocuda.driver.host import HostDriver
from tests.bad_input.things import Setting, set_up
from tests.helpers import in_a_child, in_thread, quickly
from tests.project.tree import ROOT

PAGE = ROOT / "docs" / "explanation" / "boundaries.md"

PLACES = ("thread", "loop", "child", "pickled")

#: By the beginning of a row: the thing, and how it is used.
USES: dict[str, tuple[Callable[[Setting], Any], Callable[[Setting, Any], Any]]] = {
    "`Device`": (lambda s: s.device, lambda s, device: device.stream()),
    "`Stream`": (lambda s: s.stream, lambda s, stream: stream.fill(s.buffer, 1)),
    "`Operation`": (lambda s: s.stream.synchronize(), lambda s, operation: operation.wait()),
    "`Event`": (lambda s: s.stream.record(), lambda s, event: event.wait()),
    "`DeviceBuffer`, its shape": (lambda s: s.buffer, lambda s, buffer: (buffer.shape, buffer.dtype, buffer.address)),
    "`DeviceBuffer`, freed": (lambda s: s.stream.empty(4), lambda s, buffer: buffer.free()),
    "`PinnedBuffer`": (lambda s: s.pinned, lambda s, array: array.fill(3)),
    "`Kernel`": (lambda s: s.kernel, lambda s, kernel: kernel.program(s.device.driver, 0)),
    "`Graph`": (lambda s: s.graph, lambda s, graph: graph.launch(s.other)),
    "`AsyncCoordinator`": (lambda s: s.coordinator, lambda s, coordinator: coordinator.upload(np.zeros(3))),
    "`Node`": (lambda s: s.node, lambda s, node: node.wait()),
    "`StreamPool`": (lambda s: s.pool, lambda s, pool: pool.any_ready()),
    "`StreamGroup`": (lambda s: s.group, lambda s, group: group.barrier()),
    "`EventPool`": (lambda s: s.events, lambda s, events: events.acquire_nowait()),
    "`StreamBarrier`": (lambda s: s.barrier, lambda s, barrier: _meet(s, barrier)),
    "`TripleBuffer` with buffers": (lambda s: s.owner, lambda s, ring: ring.upload_slot()),
    "`TripleBuffer`": (lambda s: s.ring, lambda s, ring: ring.acquire()),
    "`MicroBatcher`": (lambda s: s.batcher, lambda s, batcher: batcher.submit_nowait(1)),
    "`ManagedContext`": (lambda s: s.context, lambda s, context: context.stream("compute")),
    "`Pipeline`": (lambda s: s.pipeline, lambda s, one: one.execute_iteration(1)),
    "`Ticket`": (lambda s: pipeline.Ticket(0), lambda s, ticket: ticket.wait()),
}


async def _meet(setting: Setting, barrier: aiocuda.StreamBarrier) -> None:
    async with setting.device.stream() as stream:
        await barrier.wait(stream)


def cells() -> list[Any]:
    """Yield (row, place, text) of each cell that is no dash."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row, *rest = [cell.strip() for cell in line.strip("|").split("|")]
        key = next((key for key in USES if row.startswith(key)), None)
        if line.startswith("|") and key is not None:
            assert len(rest) == len(PLACES), line
            found += [
                pytest.param(key, place, cell.strip("`"), id=f"{key.strip('`')}-{place}")
                for place, cell in zip(PLACES, rest, strict=True)
                if cell != "–"
            ]
    return found


def _outcome(use: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> str:
    try:
        run(use)
    except Exception as error:  # noqa: BLE001 - its name is what is asked for
        return type(error).__name__
    return "works"


def _in_a_loop(use: Callable[[], Any]) -> None:
    async def main() -> None:
        result = use()
        if inspect.iscoroutine(result):
            await quickly(result)

    asyncio.run(main())


def _in_a_thread(use: Callable[[], Any]) -> str:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(_outcome(use, lambda use: use())))
    thread.start()
    thread.join()
    return told[0]


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning", "ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize(("row", "place", "says"), cells())
async def test_what_may_be_used_where(row: str, place: str, says: str) -> None:
    make, use = USES[row]
    driver: Any = HostDriver()
    try:
        async with set_up(driver) as setting:
            thing = make(setting)
            assert _tried(place, thing, lambda: use(setting, thing)) == says
            await quickly(setting.stream.synchronize())  # and all goes on here
    finally:
        driver.close()


def _tried(place: str, thing: Any, use: Callable[[], Any]) -> str:
    if place == "thread":
        return _in_a_thread(use)
    if place == "loop":
        return str(in_thread(lambda: _elsewhere(use)))
    if place == "child":
        return in_a_child(lambda: _outcome(use, _in_a_loop))
    return _outcome(lambda: pickle.loads(pickle.dumps(thing)), lambda use: use())


async def _elsewhere(use: Callable[[], Any]) -> str:
    try:
        result = use()
        if inspect.iscoroutine(result):
            await quickly(result)
    except Exception as error:  # noqa: BLE001 - its name is what is asked for
        return type(error).__name__
    return "works"


def test_every_use_is_in_the_table() -> None:
    assert {cell.values[0] for cell in cells()} == set(USES)
