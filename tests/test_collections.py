"""`COLLECTIONS`: the garbage collections of the process, while a device is open."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest

import aiocuda
from aiocuda._base import _collections
from aiocuda._base._collections import COLLECTIONS, Collection, GarbageCollections


def observes(collections: GarbageCollections = COLLECTIONS) -> bool:
    return collections._called in gc.callbacks


def observes_for_others() -> bool:
    """Whether a device of another test is still held, for example by the traceback of its failure."""
    gc.collect()
    return observes()


@pytest.mark.asyncio
async def test_collector_is_observed_while_a_device_is_open() -> None:
    before = observes_for_others()
    async with aiocuda.open_device(driver="host"):
        async with aiocuda.open_device(driver="simulated"):
            assert observes()
        assert observes()
    assert observes() is before


def test_collector_is_not_observed_for_a_device_that_nothing_holds() -> None:
    class Device:
        pass

    collections, device = GarbageCollections(), Device()
    collections.add_device(device)
    assert observes(collections)
    known = weakref.ref(device)
    del device
    assert known() is None
    assert not observes(collections)


@pytest.mark.asyncio
async def test_collections_are_counted_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_collections, "NOTED", 0.0)
    async with aiocuda.open_device(driver="host"):
        counts, seconds, began = list(COLLECTIONS.counts), list(COLLECTIONS.seconds), time.monotonic()
        seen: list[Collection] = []
        COLLECTIONS.observers.append(seen.append)
        gc.collect(0)
        gc.collect()
        COLLECTIONS.observers.remove(seen.append)
        assert COLLECTIONS.counts[0] > counts[0]
        assert COLLECTIONS.counts[2] > counts[2]
        assert COLLECTIONS.seconds[2] > seconds[2]
        assert {0, 2} <= {each.generation for each in seen}
        assert [each for each in COLLECTIONS.since(began) if each in seen] == seen
        longest = COLLECTIONS.longest(began, time.monotonic())
        assert longest is not None
        assert longest.seconds == max(each.seconds for each in seen)
        assert COLLECTIONS.longest(time.monotonic(), time.monotonic() + 1) is None


def test_noted_collections_are_bounded() -> None:
    collections = GarbageCollections()
    for _ in range(1000):
        collections._called("start", {"generation": 2})
        collections._start -= 1.0
        collections._called("stop", {"generation": 2})
    assert len(collections.since(0.0)) == _collections.MOST_KEPT
    assert collections.counts[2] == 1000


def test_collection_that_began_before_is_left_out() -> None:
    collections = GarbageCollections()
    collections._called("stop", {"generation": 2})
    assert collections.counts == [0] * len(collections.counts)


def test_two_loops_may_open_devices_at_the_same_time() -> None:
    async def main() -> None:
        for _ in range(20):
            async with aiocuda.open_device(driver="host"):
                assert observes()

    async def both() -> None:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, main()) for _ in range(2)))

    before = observes_for_others()
    asyncio.run(both())
    assert observes() is before
