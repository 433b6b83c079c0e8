"""Hardware that does not let the host look at managed memory while the device works (concurrentManagedAccess 0)."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import BusyError, Device, Stream, UnifiedBuffer, UnsupportedError
from aiocuda._base._types import DeviceProperties
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.host import HostDriver
from aiocuda.memory._host_view import HostView
from tests.helpers import SAXPY, Latch, Peer, open_peer, quickly

pytestmark = pytest.mark.asyncio


class Guarding(Peer):
    """A device with managed memory that reports no concurrent access: Windows, WSL 2, GPUs before Pascal."""

    def device_open(self, device: int) -> DeviceProperties:
        properties: DeviceProperties = self.inner.device_open(device)
        return dataclasses.replace(properties, concurrent_managed_access=False)


@pytest_asyncio.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
async def guarded(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    inner = HostDriver() if request.param == "host" else CudaDriver.get()
    async with open_peer(Guarding(inner)) as (_, device):
        yield device


@pytest_asyncio.fixture
async def here(guarded: Device) -> AsyncIterator[Stream]:
    async with guarded.stream(name="here") as stream:
        yield stream


@pytest.fixture
def held(guarded: Device, here: Stream) -> Iterator[Latch]:
    with Latch(guarded) as latch:
        yield latch


def buffer_of(device: Device, count: int = 8) -> UnifiedBuffer:
    buffer = device.unified(count, np.int32)
    buffer.array[:] = np.arange(count)
    return buffer


async def test_the_operation_that_uses_it_is_named(guarded: Device, here: Stream, held: Latch) -> None:
    buffer = buffer_of(guarded)
    held.hold(here)
    fill = here.fill(buffer, 3)
    await held.held()
    with pytest.raises(BusyError, match=rf"Operation {fill.id} fill on here.*await it first"):
        buffer.array  # noqa: B018 - it raises
    with pytest.raises(BusyError, match=rf"Operation {fill.id}"):
        np.asarray(buffer)
    held.release()
    await quickly(fill)
    assert (buffer.array == 3).all()


async def test_what_another_device_does_with_it_counts_too() -> None:
    with Guarding(HostDriver(devices=2)) as peer:
        async with aiocuda.open_device(driver=peer.driver) as near, aiocuda.open_device(1, driver=peer.driver) as far:
            buffer, stream = buffer_of(near), far.stream()
            target = stream.empty(8, np.int32)
            with Latch(far) as latch:
                latch.hold(stream)
                await latch.held()
                copied = stream.copy(target, buffer)
                with pytest.raises(BusyError, match=rf"Operation {copied.id} copy"):
                    buffer.array  # noqa: B018 - it raises
                latch.release()
                await quickly(copied)
            assert (buffer.array == np.arange(8)).all()


async def test_work_that_does_not_use_it_counts_too(guarded: Device, here: Stream, held: Latch) -> None:
    """CUDA forbids the host any managed memory while the device does anything at all."""
    buffer = buffer_of(guarded)
    held.hold(here)
    await held.held()
    with pytest.raises(BusyError, match="on here"):
        buffer.array  # noqa: B018 - it raises
    held.release()
    await quickly(here.synchronize())
    assert buffer.array[5] == 5


LOOKS: dict[str, Callable[[Any], object]] = {
    "index": lambda view: view[0],
    "slice": lambda view: view[2:4],
    "assign": lambda view: view.__setitem__(0, 1),
    "assign to a slice": lambda view: view.__setitem__(slice(None), 1),
    "add": lambda view: view + 1,
    "add from the right": lambda view: np.ones(8) + view,
    "add in place": lambda view: view.__iadd__(1),
    "compare": lambda view: view == 1,
    "out": lambda view: np.add(np.ones(8, np.int32), 1, out=view),
    "sum": lambda view: view.sum(),
    "np.sum": np.sum,
    "np.concatenate": lambda view: np.concatenate([np.zeros(2), view]),
    "np.array_equal": lambda view: np.array_equal(np.arange(8), view),
    "np.copyto": lambda view: np.copyto(view, 1),
    "iterate": list,
    "tolist": lambda view: view.tolist(),
    "tobytes": lambda view: view.tobytes(),
    "copy": lambda view: view.copy(),
    "copy.copy": copy.copy,
    "astype": lambda view: view.astype(float),
    "fill": lambda view: view.fill(1),
    "contains": lambda view: 3 in view,
    "sort": lambda view: view.sort(),
    "repr": repr,
    "str": str,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
async def test_views_handed_out_before_ask_again(
    guarded: Device, here: Stream, held: Latch, look: Callable[[Any], object]
) -> None:
    buffer = buffer_of(guarded)
    view, part = buffer.array, buffer.array[:]
    look(view)
    held.hold(here)
    fill = here.fill(buffer, 3)
    await held.held()
    for each in (view, part):
        with pytest.raises(BusyError, match=rf"Operation {fill.id} fill"):
            look(each)
    held.release()
    await quickly(fill)
    look(view)


async def test_views_work_as_arrays(guarded: Device) -> None:
    buffer = buffer_of(guarded)
    view = buffer.array
    view[:4] += 10
    view *= 2
    np.negative(view[6:], out=view[6:])
    assert view.tolist() == [20, 22, 24, 26, 8, 10, -12, -14]
    assert isinstance(view[1:], HostView)
    for result in (view + 1, view.copy(), np.concatenate([view, view]), view.astype(float), np.sort(view)):
        assert type(result) is np.ndarray
    assert view.sum() == np.sum(view) == np.asarray(buffer).sum() == 84
    assert view.reshape(2, 4)[1, 1] == 10


async def test_asarray_is_a_copy_there(guarded: Device, here: Stream) -> None:
    """It could not be guarded: ``asarray`` takes off what asks."""
    buffer = buffer_of(guarded)
    copied = np.asarray(buffer)
    await here.fill(buffer, 9)
    assert np.array_equal(copied, np.arange(8))
    with pytest.raises(ValueError, match="needs a guarded view"):
        np.array(buffer, copy=False)


async def test_views_hold_the_memory_there_too(guarded: Device, here: Stream) -> None:
    view = buffer_of(guarded)[2:].array[1:]
    gc.collect()
    fresh = guarded.unified(8, np.int32)
    fresh.array[:] = -1
    await here.launch(SAXPY, 1, 1, 1, 1.0, here.empty(1), here.empty(1))
    assert view.tolist() == [3, 4, 5, 6, 7]


async def test_nothing_is_prefetched_there(guarded: Device, here: Stream) -> None:
    assert guarded.properties.managed_memory
    buffer = buffer_of(guarded)
    for to in ("device", "host"):
        with pytest.raises(UnsupportedError, match=r"device\.properties\.concurrent_managed_access"):
            here.prefetch(buffer, to)


async def test_elsewhere_the_host_may_look_at_any_time(device: Device, stream: Stream, latch: Latch) -> None:
    if not device.properties.concurrent_managed_access:
        return  # what it does then is tested above
    buffer, beside = buffer_of(device), buffer_of(device)
    latch.hold(stream)
    fill = stream.fill(buffer, 3)
    await latch.held()
    assert (buffer.array == np.arange(8)).all()
    beside.array[:] = 4
    latch.release()
    await quickly(fill)
    assert (buffer.array == 3).all()
    assert type(buffer.array) is np.ndarray
