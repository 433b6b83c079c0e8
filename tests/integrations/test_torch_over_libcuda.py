"""M2: `submit` of PyTorch on a stream of the CUDA driver, without a GPU: stand-ins answer for PyTorch and libcuda."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

import aiocuda
from aiocuda import BusyError, Stream
from aiocuda.lowlevel import queue_of
from tests.core.test_over_libcuda import NOT_READY, fake, library, opened
from tests.driver.cuda.fake import Fake
from tests.helpers import quickly
from tests.integrations.torch_stand_in import StandIn

__all__ = ["fake", "library"]  # fixtures

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=[True, False], ids=["primitives", "no primitives"])
def torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn(request.param)
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    ours = [f"aiocuda.integrations.{name}" for name in ("torch", "_torch_calls", "_torch_state")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield stand_in
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def submit(torch: StandIn) -> Any:
    return importlib.import_module("aiocuda.integrations.torch").submit


@pytest_asyncio.fixture
async def stream(fake: Fake) -> AsyncIterator[Stream]:
    async with opened(fake) as device, device.stream() as opened_stream:
        yield opened_stream


def handle_of(stream: Stream) -> int:
    queue = queue_of(stream)
    return queue.driver.stream_handle(queue.handle)


async def test_function_runs_on_our_stream_behind_the_work_of_the_caller(
    torch: StandIn, submit: Any, stream: Stream
) -> None:
    torch.current, handle = 77, handle_of(stream)
    assert await quickly(submit(stream, lambda x, *, y: (torch.current, x + y), 1, y=2)) == (handle, 3)
    (kind, event, recorded), (waiting, same, waited), *switches = torch.log
    assert (kind, recorded, waiting, waited) == ("record", 77, "wait", handle)
    assert event is same
    assert switches == [("current", handle), ("current", 77)]


async def test_caller_on_the_same_stream_is_not_waited_for(torch: StandIn, submit: Any, stream: Stream) -> None:
    torch.current = handle_of(stream)
    await quickly(submit(stream, lambda: None))
    assert {entry[0] for entry in torch.log} == {"current"}


async def test_function_that_waited_runs_in_the_state_of_its_caller(
    torch: StandIn, submit: Any, stream: Stream, fake: Fake
) -> None:
    """And the thread then has the state that it had: here that of a block with autocast, on another stream."""
    fake.answer("cuEventQuery", NOT_READY)
    first = [submit(stream, lambda: None) for _ in range(2)]
    torch.modes["grad"] = False
    of_caller = dict(torch.modes)
    waiting = submit(stream, lambda: (dict(torch.modes), torch.current))
    torch.modes |= {"grad": True, "inference": True, "cuda": True, "cuda dtype": "bfloat16", "cache": False}
    torch.current = 78
    of_others = dict(torch.modes)
    assert waiting.state == "queued"
    cleared = torch.count["clear_autocast_cache"]
    fake.answer("cuEventQuery", 0, times=0)
    await quickly(aiocuda.gather(*first))
    assert await quickly(waiting) == (of_caller, handle_of(stream))
    assert torch.modes == of_others
    assert torch.current == 78
    assert torch.count["clear_autocast_cache"] == cleared + 2  # before and after it


async def test_function_of_a_caller_with_autocast(torch: StandIn, submit: Any, stream: Stream) -> None:
    """It uses no cast of another stream."""
    torch.modes |= {"cuda": True, "cuda dtype": "bfloat16"}
    modes = dict(torch.modes)
    assert await quickly(submit(stream, lambda: dict(torch.modes))) == modes
    assert torch.count["clear_autocast_cache"] == 2


async def test_dtypes_of_autocast_are_read_once_while_there_is_none(
    torch: StandIn, submit: Any, stream: Stream
) -> None:
    await quickly(submit(stream, lambda: None))
    read = torch.count["get_autocast_dtype"]
    await quickly(aiocuda.gather(*[submit(stream, lambda: None) for _ in range(20)]))
    assert torch.count["get_autocast_dtype"] == read


async def test_events_are_used_again(torch: StandIn, submit: Any, stream: Stream) -> None:
    for _ in range(20):
        await quickly(submit(stream, lambda: None))
    assert len({event for kind, event, *_ in torch.log if kind == "record"}) == 1


async def test_tensors_of_a_result_are_recorded_for_the_stream_of_the_caller_when_they_are_done(
    torch: StandIn, submit: Any, stream: Stream, fake: Fake
) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    operation = submit(stream, lambda: {"x": torch.Tensor()})
    waiting = asyncio.ensure_future(operation.wait())
    await asyncio.sleep(0)
    assert "record_stream" not in {entry[0] for entry in torch.log}
    fake.answer("cuEventQuery", 0, times=0)
    tensor = (await quickly(waiting))["x"]
    assert torch.log[-1] == ("record_stream", tensor, 0)


@pytest.mark.parametrize("device", [0, 1])
async def test_capture_of_the_caller_is_refused(torch: StandIn, submit: Any, stream: Stream, device: int) -> None:
    torch.current, torch.current_device, torch.is_captured = 77, device, True
    with pytest.raises(BusyError, match="PyTorch's current stream is being captured"):
        submit(stream, lambda: None)
    assert torch.current_device == device
    assert not torch.log


async def test_current_device_of_the_caller_comes_back(torch: StandIn, submit: Any, stream: Stream) -> None:
    torch.current_device = 1
    assert await quickly(submit(stream, lambda: torch.current_device)) == 0
    assert torch.current_device == 1


async def test_stream_comes_back_if_the_function_fails(torch: StandIn, submit: Any, stream: Stream) -> None:
    torch.current = 77
    with pytest.raises(ZeroDivisionError):
        await quickly(submit(stream, lambda: 1 / 0))
    assert torch.current == 77
    gc.collect()
