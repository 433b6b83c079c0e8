"""Every change of a node's phase is in the table of `aiocuda.coordination._scheduled_node`."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from aiocuda import AsyncCoordinator, Device
from aiocuda.coordination._scheduled_node import ABANDONED, DONE, READY, TRANSITIONS, WAITING, ScheduledNode
from tests.coordination.graphs import BUMP, ITEMS, BodyError


def test_from_each_unfinished_phase_a_node_can_finish() -> None:
    assert set(TRANSITIONS) == set(range(ABANDONED + 1))
    for phase, following in TRANSITIONS.items():
        assert bool(following) == (phase < DONE)


@pytest.mark.asyncio
@pytest.mark.parametrize("places", [1, 64])
async def test_nodes_change_their_phase_by_the_table(
    device: Device, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    seen: set[tuple[int, int]] = set()

    def set_attribute(node: ScheduledNode[Any], name: str, value: Any) -> None:
        if name == "phase" and value != node.phase:
            seen.add((node.phase, value))
        object.__setattr__(node, name, value)

    monkeypatch.setattr(ScheduledNode, "__setattr__", set_attribute, raising=False)
    with contextlib.suppress(ExceptionGroup, BodyError):
        async with AsyncCoordinator(device, places) as coordinator:
            x = coordinator.upload(np.zeros(ITEMS, np.uint32))
            for _ in range(5):
                coordinator.compute(BUMP, 1, 32, x, 1, ITEMS)
            waits = coordinator.host(lambda: None, after=x)
            late = coordinator.compute(BUMP, 1, 32, x, 1, ITEMS, priority="cleanup")
            with contextlib.suppress(Exception):
                coordinator.add_dependency(late, waits)
            coordinator.compute(BUMP, 1, 32, x, 1, ITEMS, after=waits).abandon()
            with contextlib.suppress(BodyError):
                async with coordinator.operation("kernel", writes=(x.buffer,)):
                    raise BodyError
            coordinator.download(x)  # is skipped
    assert len(seen) >= 5
    for before, after in seen:
        assert after in TRANSITIONS[before], (before, after)
    assert places == 64 or (WAITING, READY) in seen
