"""A batch whose copy into tensors fails is delivered again. It runs with a stand-in for PyTorch and its streams."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError
from aiocuda.data import DataLoader, sync_loader, sync_to_device, to_device
from aiocuda.driver.cuda import CudaDriver
from aiocuda.driver.host import HostDriver
from tests.core.test_over_libcuda import fake, library
from tests.data.samples import FIELDS, refuses_fives, write
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import IMPORTED
from tests.helpers import PATIENCE, quickly, until

__all__ = ["fake", "library"]  # fixtures

BATCHES = [[0, 1], [2, 3], [4, 5], [6]]


class OutOfMemoryError(RuntimeError):
    """The one of PyTorch."""


class StandIn(ModuleType):
    """The module ``torch``, as far as fields need it.

    Attributes
    ----------
    fails : list of BaseException
        What the copies of the next batches raise, after the first array.
    captured : bool
        The current stream is being captured.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        self.__spec__ = ModuleSpec("torch", None)
        self.fails: list[BaseException] = []
        self.captured = False
        self._copies = 0
        self.cuda = SimpleNamespace(
            is_available=lambda: True, current_stream=lambda index: IMPORTED, stream=contextlib.nullcontext,
            is_current_stream_capturing=lambda: self.captured,
        )  # fmt: skip

    def device(self, *names: Any) -> Any:
        return names

    def from_dlpack(self, array: Any) -> Any:
        self._copies += 1
        if self.fails and self._copies % 2 == 0:
            raise self.fails.pop()
        if array.__dlpack_device__()[0] == 1:
            found = np.from_dlpack(array)
        else:
            array.__dlpack__(stream=IMPORTED)
            found = np.zeros(array.shape)
        return SimpleNamespace(clone=found.copy)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    return stand_in


OPTIONS: dict[str, Any] = {"fields": FIELDS, "decode": write, "batch_size": 2, "output": "torch"}


def samples(batch: Any) -> Any:
    return (batch["y"] // 2).tolist()


@pytest.mark.asyncio
@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"ordered": False}, {"decode": refuses_fives, "on_error": "skip"}])
async def test_a_loader_delivers_the_batch_again(torch: StandIn, fails_at: int, options: Any) -> None:
    wanted = BATCHES if "on_error" not in options else [[1], [2, 3], [4], [6]]
    async with aiocuda.open_device(driver="host") as device:
        async with DataLoader(device, range(7), **OPTIONS | options) as loader:
            batches, found = aiter(loader), []
            states = [loader.state_dict()]
            for number in range(4):
                if number == fails_at:
                    torch.fails = [OutOfMemoryError() for _ in range(2)]
                    for _ in range(2):
                        with pytest.raises(OutOfMemoryError):
                            await anext(batches)
                        assert loader.state_dict() == states[-1]
                found.append(samples(await anext(batches)))
                states.append(loader.state_dict())
            assert await anext(batches, None) is None
            statistics = loader.statistics()
            assert (statistics.batches, statistics.samples) == (4, sum(map(len, wanted)))
        assert sorted(found) == wanted
        async with DataLoader(device, range(7), **OPTIONS | options) as loader:
            loader.load_state_dict(states[fails_at])
            assert sorted([*found[:fails_at], *[samples(batch) async for batch in loader]]) == wanted
        assert device.memory.statistics().live_bytes == 0


class Sample:
    """A sample that can be referred to weakly."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.asyncio
async def test_a_loader_without_tensors_keeps_no_sample_of_the_batch_in_hand() -> None:
    alive = WeakSet[Sample]()

    def source() -> Iterator[Sample]:
        for number in range(4):
            sample = Sample(number)
            alive.add(sample)
            yield sample
            del sample

    def decode(sample: Sample, out: Any) -> None:
        write(sample.number, out)

    async with aiocuda.open_device(driver="host") as device:
        async with DataLoader(device, source(), fields=FIELDS, decode=decode, batch_size=4, prefetch=1) as loader:
            await anext(aiter(loader))
            await until(lambda: not alive)  # a thread may still leave the function that read the last one


class Source:
    """Batches with a state, which is set back after `break`."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 5:
            self.at += 1
            yield {"y": np.array([2 * self.at]), "x": np.zeros(2)}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def split(torch: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `to_device` needs of PyTorch in addition."""
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]


@pytest.mark.asyncio
@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("goes_on", [True, False])
async def test_another_loaders_batch_is_delivered_again(torch: StandIn, goes_on: bool) -> None:
    source = Source()
    async with aiocuda.open_device(driver="host") as device:
        async with to_device(source, device, output="torch") as loader:
            batches = aiter(loader)
            assert samples(await anext(batches)) == [1]
            torch.fails = [OutOfMemoryError()]
            with pytest.raises(OutOfMemoryError):
                await anext(batches)
            assert loader.state_dict() == {"at": 1}
            if goes_on:
                assert samples(await anext(batches)) == [2]
                assert loader.state_dict() == {"at": 2}
            else:
                assert [samples(batch) async for batch in loader] == [[2], [3], [4], [5]]
        assert source.at == (2 if goes_on else 0)
        assert device.memory.statistics().live_bytes == 0


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_plain_loop_gets_the_batch_again(torch: StandIn, fails_at: int) -> None:
    with sync_loader(range(7), driver=HostDriver(), **OPTIONS) as loader:
        batches, found = iter(loader), []
        state = loader.state_dict()
        for number in range(4):
            if number == fails_at:
                for error in (OutOfMemoryError(), KeyboardInterrupt()):
                    torch.fails = [error]
                    with pytest.raises(type(error)):
                        next(batches)
                    assert loader.state_dict() == state
            found.append(samples(next(batches)))
            state = loader.state_dict()
        assert next(batches, None) is None
        assert loader.statistics().batches == 4
        assert loader.statistics().kept == 0
    assert found == BATCHES


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_plain_loop_gets_another_loaders_batch_again(torch: StandIn, goes_on: bool) -> None:
    source = Source()
    with sync_to_device(source, driver=HostDriver(), output="torch") as loader:
        batches = iter(loader)
        assert samples(next(batches)) == [1]
        torch.fails = [OutOfMemoryError()]
        with pytest.raises(OutOfMemoryError):
            next(batches)
        assert loader.state_dict() == {"at": 1}
        if goes_on:
            assert samples(next(batches)) == [2]
        else:
            assert [samples(batch) for batch in loader] == [[2], [3], [4], [5]]
    assert source.at == (2 if goes_on else 0)


# -- captures --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_capture_that_begins_during_the_request_gets_no_batch(torch: StandIn, fake: Fake) -> None:
    may_decode = threading.Event()

    def decode(sample: int, out: Any) -> None:
        if sample == 1:
            may_decode.wait(PATIENCE)
        write(sample, out)

    options = OPTIONS | {"batch_size": 1, "decode": decode}
    async with aiocuda.open_device(driver=CudaDriver(fake.path)) as device:
        async with DataLoader(device, range(3), **options) as loader:
            batches: Any = aiter(loader)
            assert (await quickly(anext(batches))).indices == (0,)
            request = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(0)
            torch.captured = True
            may_decode.set()
            for refused in (request, anext(batches)):
                with pytest.raises(BusyError, match="is being captured into a graph"):
                    await quickly(refused)
            torch.captured = False
            assert [batch.indices async for batch in batches] == [(1,), (2,)]


def test_a_plain_loop_waits_for_the_copies_of_a_batch_that_failed(torch: StandIn, fake: Fake) -> None:
    """The event after them is waited for, and destroyed."""
    driver = CudaDriver(fake.path)
    with sync_loader(range(7), driver=driver, **OPTIONS) as loader:
        batches = iter(loader)
        torch.fails = [OutOfMemoryError()]
        with pytest.raises(OutOfMemoryError):
            next(batches)
        fake.forget()
        assert next(batches).indices == (0, 1)
        recorded = [call for call in fake.calls("cuEventRecord") if call.arguments[1] == IMPORTED]
        assert len(recorded) == 2  # of both tries
        waited = {call.arguments[1] for call in fake.calls("cuStreamWaitEvent")}
        assert recorded[0].arguments[0] in waited
        torch.captured = True
        with pytest.raises(BusyError, match="is being captured into a graph"):
            next(batches)
        torch.captured = False
        assert [batch.indices for batch in batches] == [(2, 3), (4, 5), (6,)]
