"""The state of a source of `to_device`: that after the delivered batches, though the source is read ahead."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, CleanupWarning, ClosedError, Device, InvalidArgumentError, InvalidTypeError
from aiocuda.data import DeviceBatches, SyncDeviceBatches, sync_to_device, to_device
from aiocuda.driver.host import HostDriver
from tests.helpers import LATCH, until

EPOCH = 5


class OnSource:
    """The source has the state: its epoch and its position. It goes on after the state that was loaded."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < EPOCH:
            self.at += 1
            yield np.array([10 * self.epoch + self.at])
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class InPlace(OnSource):
    """It returns the same dictionary each time, and keeps the one that is loaded."""

    def __init__(self) -> None:
        self.state = {"counts": [0, 0]}

    @property
    def epoch(self) -> int:
        return self.state["counts"][0]

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.state["counts"][0] = value

    @property
    def at(self) -> int:
        return self.state["counts"][1]

    @at.setter
    def at(self, value: int) -> None:
        self.state["counts"][1] = value

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Asynchronous(OnSource):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in OnSource.__iter__(self):
            await asyncio.sleep(0)
            yield each


class WithState(Iterator[Any]):
    """An iterator with a state, by Grain's names."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> Any:
        if self.at == EPOCH:
            raise StopIteration
        self.at += 1
        return np.array([self.at])

    def get_state(self) -> Any:
        return {"next": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["next"]


class OnIterator:
    """Each iterator has a state, and the source has none."""

    def __iter__(self) -> Iterator[Any]:
        return WithState()


class OnAsyncIterator:
    def __aiter__(self) -> AsyncIterator[Any]:
        return AsyncWithState()


class AsyncWithState(AsyncIterator[Any]):
    def __init__(self) -> None:
        self._iterator = WithState()

    async def __anext__(self) -> Any:
        for each in self._iterator:
            return each
        raise StopAsyncIteration

    def state_dict(self) -> Any:
        return self._iterator.get_state()

    def load_state_dict(self, state: Any) -> None:
        self._iterator.set_state(state)


WITH_STATE: dict[str, Any] = {
    "on the source": OnSource,
    "in place": InPlace,
    "asynchronous": Asynchronous,
    "on the iterator": OnIterator,
    "on the asynchronous iterator": OnAsyncIterator,
}
EVERY: dict[str, Any] = {**WITH_STATE, "iterator": WithState}


def numbers_of(source: Any, epoch: int) -> list[int]:
    """The items of an epoch."""
    return [10 * epoch * isinstance(source, OnSource) + at for at in range(1, EPOCH + 1)]


async def some(batches: DeviceBatches, most: int = 99) -> list[int]:
    """The items of the next batches."""
    found: list[int] = []
    async for batch in batches:
        found.append(int((await batch.stream.download(batch[0]))[0]))
        if len(found) == most:
            break
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("source", WITH_STATE.values(), ids=WITH_STATE)
@pytest.mark.parametrize("batches_before", range(2 * EPOCH + 1))
async def test_a_new_source_goes_on_after_the_delivered_batches(
    device: Device, source: Any, batches_before: int
) -> None:
    """The process ends after so many batches of two epochs."""
    epochs_before, in_epoch = divmod(batches_before, EPOCH)
    before: list[int] = []
    async with to_device(source(), device) as batches:
        for _ in range(epochs_before):
            before += await some(batches)
        if in_epoch:
            before += await some(batches, in_epoch)
        saved = pickle.dumps(batches.state_dict())
    rest: list[int] = []
    async with to_device(source(), device) as batches:
        batches.load_state_dict(pickle.loads(saved))
        while len(before + rest) < 2 * EPOCH:
            rest += await some(batches)
    read = source()
    assert before + rest == numbers_of(read, 0) + numbers_of(read, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("source", EVERY.values(), ids=EVERY)
async def test_a_state_is_that_of_the_source_without_what_was_read_ahead(device: Device, source: Any) -> None:
    plain = source()
    iterator = aiter(plain) if hasattr(plain, "__aiter__") else iter(plain)
    owner: Any = plain if isinstance(plain, (OnSource, WithState)) else iterator
    take = getattr(owner, "state_dict", None) or owner.get_state
    expected = [pickle.dumps(take())]
    for _ in range(EPOCH):
        await anext(iterator) if hasattr(plain, "__aiter__") else next(iterator)
        expected.append(pickle.dumps(take()))
    async with to_device(source(), device) as batches:
        found = [pickle.dumps(batches.state_dict())]
        found += [pickle.dumps(batches.state_dict()) async for _ in batches]
    assert found == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("source", EVERY.values(), ids=EVERY)
async def test_after_break_a_source_with_a_state_goes_on(device: Device, source: Any) -> None:
    async with to_device(source(), device) as batches:
        assert await some(batches, 2) == [1, 2]
        assert await some(batches, 1) == [3]
        assert await some(batches) == [4, 5]
        if source is not WithState:
            assert await some(batches) == numbers_of(source(), 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("source", [OnSource, InPlace, Asynchronous, WithState])
async def test_the_end_of_a_block_sets_the_source_back(device: Device, source: Any) -> None:
    read = source()
    for expected in [1, 2], [3, 4], [5]:
        async with to_device(read, device) as batches:
            assert await some(batches, 2) == expected


@pytest.mark.asyncio
async def test_a_request_that_is_cancelled_at_the_start_loses_no_batch(device: Device) -> None:
    gate, reading = threading.Event(), threading.Event()

    class Waits(OnSource):
        def __iter__(self) -> Iterator[Any]:
            reading.set()
            gate.wait(LATCH)
            yield from super().__iter__()

    async with to_device(Waits(), device) as batches:
        request = asyncio.ensure_future(some(batches))
        await until(reading.is_set)
        request.cancel()
        await asyncio.wait({request})
        assert batches.state_dict() == {"epoch": 0, "at": 0}
        gate.set()
        assert await some(batches) == [1, 2, 3, 4, 5]


@pytest.mark.asyncio
async def test_after_a_failure_the_batch_is_read_again(device: Device) -> None:
    class Fails(OnSource):
        failures = 1

        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                if self.at == 3 and self.failures:
                    self.failures = 0
                    raise OSError("the disk was busy")
                yield each

    batches = to_device(Fails(), device)
    with pytest.raises(OSError, match="the disk was busy"):
        await some(batches)
    assert batches.state_dict() == {"epoch": 0, "at": 2}
    assert await some(batches) == [3, 4, 5]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [OnSource, Asynchronous])
async def test_a_source_whose_state_is_not_implemented_has_none(device: Device, kind: Any) -> None:
    class Without(kind):  # type: ignore[misc]
        def state_dict(self) -> Any:
            raise NotImplementedError

    async with to_device(Without(), device) as batches:
        assert await some(batches) == [1, 2, 3, 4, 5]
        with pytest.raises(InvalidTypeError, match="has no state"):
            batches.state_dict()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [OnSource, Asynchronous])
async def test_a_state_that_cannot_be_taken_fails_the_batch(device: Device, kind: Any) -> None:
    class Fails(kind):  # type: ignore[misc]
        def state_dict(self) -> Any:
            return {"lock": threading.Lock()}

    with pytest.raises(TypeError, match="lock") as caught:
        await some(to_device(Fails(), device))
    assert "in the state of the source of to_device()" in caught.value.__notes__


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [OnSource, Asynchronous])
async def test_a_source_that_is_not_set_back_at_the_end_is_a_warning(device: Device, kind: Any) -> None:
    class Refuses(kind):  # type: ignore[misc]
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("not now")

    with pytest.warns(CleanupWarning, match=r"was not set back to the last delivered batch: RuntimeError\('not now'\)"):
        async with to_device(Refuses(), device) as batches:
            assert await some(batches, 2) == [1, 2]


@pytest.mark.asyncio
async def test_the_states_that_a_program_gets_and_gives_are_its_own(device: Device) -> None:
    async with to_device(InPlace(), device) as batches:
        mine = {"counts": [0, 2]}
        batches.load_state_dict(mine)
        mine["counts"][1] = 4
        batches.state_dict()["counts"][1] = 4
        assert await some(batches, 1) == [3]
        batches.state_dict()["counts"][1] = 0
        assert await some(batches) == [4, 5]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "source", [lambda: [np.zeros(1)], lambda: iter([np.zeros(1)]), lambda: (np.zeros(1) for _ in range(1))]
)
async def test_a_source_without_a_state(device: Device, source: Any) -> None:
    message = "has no state: neither it nor its iterator has the methods state_dict and load_state_dict, or get_state"
    async with to_device(source(), device) as batches:
        with pytest.raises(InvalidTypeError, match=message):
            batches.state_dict()
        await some(batches)
        with pytest.raises(InvalidTypeError, match=message):
            batches.state_dict()
    async with to_device(source(), device) as batches:
        batches.load_state_dict({})
        with pytest.raises(InvalidTypeError, match=message):
            await some(batches)


@pytest.mark.asyncio
async def test_a_state_is_loaded_before_the_first_batch_or_after_the_last(device: Device) -> None:
    async with to_device(OnSource(), device) as batches:
        await some(batches, 1)
        with pytest.raises(BusyError, match="is being iterated: load a state before the first batch"):
            batches.load_state_dict({"epoch": 0, "at": 0})
        await some(batches)
        batches.load_state_dict({"epoch": 7, "at": 3})
        assert batches.state_dict() == {"epoch": 7, "at": 3}
        assert int((await anext(batches))[0].shape[0]) == 1
        assert await some(batches) == [75]


@pytest.mark.asyncio
async def test_a_state_that_the_source_refuses(device: Device) -> None:
    batches = to_device(OnSource(), device)
    batches.load_state_dict({"epoch": 0})
    for _ in range(2):
        with pytest.raises(KeyError, match="at"):
            await some(batches)
    batches.load_state_dict({"epoch": 0, "at": 4})
    assert await some(batches) == [5]


# -- a plain loop ----------------------------------------------------------------------------------------------------


def some_plainly(batches: SyncDeviceBatches, most: int = 99) -> list[int]:
    found: list[int] = []
    for batch in batches:
        found.append(int(batch[0].to_host()[0]))
        if len(found) == most:
            break
    return found


@pytest.mark.parametrize("source", WITH_STATE.values(), ids=WITH_STATE)
def test_a_plain_loop_resumes_after_the_delivered_batches(source: Any) -> None:
    expected = numbers_of(source(), 0) + numbers_of(source(), 1)
    for batches_before in range(2 * EPOCH):
        before: list[int] = []
        with sync_to_device(source(), driver=HostDriver()) as batches:
            while len(before) < batches_before:
                before += some_plainly(batches, batches_before - len(before))
            saved = pickle.dumps(batches.state_dict())
            assert batches.statistics().batches == batches_before
        with sync_to_device(source(), driver=HostDriver()) as batches:
            batches.load_state_dict(pickle.loads(saved))
            rest: list[int] = []
            while len(before + rest) < 2 * EPOCH:
                rest += some_plainly(batches)
        assert before + rest == expected


@pytest.mark.parametrize("source", EVERY.values(), ids=EVERY)
def test_a_plain_loop_goes_on_after_break(source: Any) -> None:
    with sync_to_device(source(), driver=HostDriver(), depth=2) as batches:
        assert some_plainly(batches, 2) == [1, 2]
        assert some_plainly(batches, 1) == [3]
        assert some_plainly(batches) == [4, 5]


def test_a_plain_loop_over_sources_without_a_state() -> None:
    arrays = [np.array([number]) for number in range(4)]
    with sync_to_device(iter(arrays), driver=HostDriver()) as batches:
        assert some_plainly(batches, 2) == [0, 1]
        assert some_plainly(batches) == [2, 3]
        with pytest.raises(InvalidTypeError, match="has no state"):
            batches.state_dict()
    with sync_to_device(arrays, driver=HostDriver()) as batches:
        assert len(batches) == 4
        left = iter(batches)
        assert next(left).number == 0
        assert some_plainly(batches, 2) == [0, 1]
        with pytest.raises(ClosedError, match="another `async for`"):
            next(left)
        assert some_plainly(batches) == [0, 1, 2, 3]


def test_a_plain_loop_gets_what_the_source_raises() -> None:
    def source() -> Iterator[Any]:
        yield np.array([1])
        raise OSError("the disk is gone")

    with sync_to_device(source(), driver=HostDriver()) as batches:
        with pytest.raises(OSError, match="the disk is gone"):
            some_plainly(batches)
    with pytest.raises(InvalidArgumentError, match="depth is at least 1"):
        with sync_to_device([], driver=HostDriver(), depth=0):
            pass


# -- random programs -------------------------------------------------------------------------------------------------


async def state_of(batches: Any) -> Any:
    """The state. After a cancelled request, the source may still be being opened."""
    found: list[Any] = []

    def take() -> list[Any]:
        with contextlib.suppress(BusyError):
            found.append(batches.state_dict())
        return found

    await until(take, "the state")
    return found[0]


async def at_random(device: Device, kind: Any, chance: random.Random) -> list[int]:
    """Take two epochs, with breaks, cancelled requests, new blocks, and new sources from the saved state."""
    found: list[int] = []
    read, saved = kind(), None
    while len(found) < 2 * EPOCH:
        before = len(found)
        async with to_device(read, device, depth=chance.randint(1, 4)) as batches:
            if saved is not None:
                batches.load_state_dict(pickle.loads(saved))
            for _ in range(chance.randint(1, 4)):
                if chance.random() < 0.3:
                    request = asyncio.ensure_future(anext(aiter(batches)))
                    for _ in range(chance.randint(0, 4)):
                        await asyncio.sleep(0)
                    if not request.done():
                        request.cancel()
                    await asyncio.wait({request})
                    if not request.cancelled() and request.exception() is None:
                        batch = request.result()
                        found.append(int((await batch.stream.download(batch[0]))[0]))
                else:
                    found += await some(batches, chance.randint(1, EPOCH + 1))
                if len(found) >= 2 * EPOCH:
                    break
            saved = pickle.dumps(await state_of(batches))
        if chance.random() < 0.5 or not isinstance(read, OnSource):
            read = kind()  # another process
        elif len(found) > before:
            saved = None  # the source has it, and the end of the block has set it back
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_STATE.values(), ids=WITH_STATE)
def test_random_programs_get_each_batch_once(kind: Any) -> None:
    for seed in range(30):

        async def main(seed: int = seed) -> None:
            async with aiocuda.open_device(driver=HostDriver()) as device:
                found = await at_random(device, kind, random.Random(seed))
            expected = [number for epoch in range(9) for number in numbers_of(kind(), epoch)]
            assert found == expected[: len(found)], seed

        asyncio.run(main())
