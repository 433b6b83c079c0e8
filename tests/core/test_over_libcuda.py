"""The core over the functions of libcuda, which are called in C by the compiled form: a recording libcuda answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    Device,
    DeviceFault,
    DeviceOutOfMemory,
    InvalidArgumentError,
    Kernel,
    SkippedError,
    UnsupportedError,
)
from aiocuda._core import stream_operation
from aiocuda._core._form import form
from aiocuda.completion._wait_rule import CompletionPolicy
from aiocuda.driver.cuda import _library
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import CompiledKernel
from tests.driver.cuda.fake import Fake, build
from tests.helpers import PATIENCE, quickly
from tests.project.tree import ROOT

pytestmark = pytest.mark.asyncio

OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_READY = 2, 700, 600

EMPTY = Kernel("empty", source='extern "C" __global__ void empty() {}')
SCALE = Kernel("scale", source='extern "C" __global__ void scale(float *data, float factor, int count) {}')


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "AIOCUDA_GIL", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(_library, "_initialised_by", None)
    fake = Fake(library)
    fake.value("cuDeviceGetCount", 1)
    yield fake
    fake.reset()


@contextlib.asynccontextmanager
async def opened(fake: Fake, **options: Any) -> AsyncIterator[Device]:
    """A device of the recording libcuda, which gives all kernels the same parameters."""
    driver = CudaDriver(fake.path)
    driver.compile = lambda device, source: CompiledKernel(b"cubin", source.name)  # type: ignore[method-assign]
    async with aiocuda.open_device(driver=driver, **options) as device:
        yield device


async def test_repeated_launch_makes_two_calls_in_order(fake: Fake) -> None:
    """Only the first launch binds. The arguments of each launch arrive, and each record is of another event."""
    fake.parameters((0, 8), (8, 4), (12, 4))
    async with opened(fake) as device:
        stream = device.stream()
        buffer = stream.empty(4, np.float32)
        await stream.launch(SCALE, 1, 1, buffer, 0.0, 0)
        fake.forget()
        operations = []
        for value in range(3):
            operations.append(stream.launch(SCALE, 1, 1, buffer, value / 2, -value))
            packed = np.frombuffer(fake.launched()[1][:16], np.uint8)
            assert packed[:8].view(np.uint64)[0] == buffer.address
            assert packed[8:12].view(np.float32)[0] == value / 2
            assert packed[12:].view(np.int32)[0] == -value
        calls = [call for call in fake.calls() if call.name in ("cuLaunchKernelEx", "cuEventRecord")]
        assert [call.name for call in calls] == ["cuLaunchKernelEx", "cuEventRecord"] * 3
        assert len({call.arguments[0] for call in calls[1::2]}) == 3
        assert all(call.kept_gil for call in calls)
        assert await quickly(aiocuda.gather(*operations)) == [None] * 3


async def test_repeated_copy_makes_two_calls(fake: Fake) -> None:
    async with opened(fake) as device:
        stream = device.stream()
        buffer, pinned = stream.empty(4), device.pinned(4)
        await pinned
        for _ in range(2):
            await quickly(stream.copy(buffer, pinned))
            await quickly(stream.copy(pinned, buffer))
        for source, target, name in ((pinned, buffer, "cuMemcpyHtoDAsync"), (buffer, pinned, "cuMemcpyDtoHAsync")):
            fake.forget()
            operation = stream.copy(target, source)
            copy, record = (call for call in fake.calls() if not call.name.startswith("cuCtx"))
            assert (copy.name, record.name) == (name, "cuEventRecord")
            assert copy.arguments[2] == buffer.nbytes
            await quickly(operation)


async def test_await_asks_for_its_own_event_until_it_is_done(fake: Fake) -> None:
    async with opened(fake) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        operation = stream.launch(EMPTY, 1, 1)
        record = fake.calls("cuEventRecord")[-1]
        fake.answer("cuEventQuery", NOT_READY, times=3)
        fake.forget()
        await quickly(operation)
        queries = fake.calls("cuEventQuery")
        assert len(queries) >= 4
        assert {query.arguments[0] for query in queries[:4]} == {record.arguments[0]}


async def test_calls_are_counted(fake: Fake) -> None:
    async with opened(fake) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        before = device.driver.statistics()["calls"]
        stream.launch(EMPTY, 1, 1)
        assert device.driver.statistics()["calls"] == before + 2
        await stream.synchronize()


@pytest.mark.parametrize("function", ["cuLaunchKernelEx", "cuEventRecord", "cuEventQuery"])
async def test_fault_reaches_every_waiter(fake: Fake, function: str) -> None:
    """A fault in any of the three functions fails the operations of all streams, and later calls are not made."""
    async with opened(fake) as device:
        first, second = device.stream(), device.stream()
        for stream in (first, second):
            await stream.launch(EMPTY, 1, 1)
        fake.answer("cuEventQuery", NOT_READY)
        waiting = second.launch(EMPTY, 1, 1)
        fake.answer(function, ILLEGAL_ADDRESS)
        failing = first.launch(EMPTY, 1, 1)
        for operation in (failing, waiting):
            with pytest.raises(DeviceFault, match="700"):
                await quickly(operation.wait())
        fake.forget()
        with pytest.raises(DeviceFault):
            first.launch(EMPTY, 1, 1)
        assert not fake.calls("cuLaunchKernelEx")


async def test_stages_of_an_item_wait_for_each_other_on_the_device(fake: Fake) -> None:
    """Each stage makes one wait, for the event of the stage before it, and one launch with an event after it."""

    def compute(slot: aiocuda.Slot) -> Any:
        return slot.stream.launch(EMPTY, 1, 1)

    stages = [aiocuda.Stage(name, compute) for name in ("first", "second", "third")]
    async with opened(fake) as device, aiocuda.Pipeline(device, stages, 1) as pipeline:
        async for item in _numbered(pipeline.run(range(40))):
            if item == 30:  # the first items are timed, by events before and after each stage
                fake.forget()
                fake.answer("cuEventQuery", NOT_READY, times=2)
            if item == 31:
                break
    names = ("cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent")
    calls = [call for call in fake.calls() if call.name in names][:8]
    launch, record, wait = names
    assert [call.name for call in calls] == [launch, record, wait, launch, record, wait, launch, record]
    events = [call.arguments[0] for call in calls if call.name == record]
    streams = [call.arguments[1] for call in calls if call.name == record]
    assert len(set(streams)) == 3
    assert [call.arguments[:2] for call in calls if call.name == wait] == [
        (streams[1], events[0]),
        (streams[2], events[1]),
    ]


async def _numbered(results: AsyncIterator[Any]) -> AsyncIterator[int]:
    """Count results from 1 on; the next item begins when this one is asked for again."""
    number = 0
    async for _ in results:
        number += 1
        yield number


async def test_barrier_makes_two_waits_for_each_other_stream(fake: Fake) -> None:
    """The first stream waits for the events of the others and records its own; then the others wait for that."""
    async with opened(fake) as device, aiocuda.StreamGroup(device, 3) as group:
        for _ in range(2):
            await quickly(aiocuda.gather(*(stream.launch(EMPTY, 1, 1) for stream in group), group.barrier()))
        operations = [stream.launch(EMPTY, 1, 1) for stream in group]
        events = {call.arguments[1]: call.arguments[0] for call in fake.calls("cuEventRecord")[-3:]}
        first, second, third = events
        fake.forget()
        joined = group.barrier()
        names = ("cuEventRecord", "cuStreamWaitEvent")
        calls = [(call.name, call.arguments[:2]) for call in fake.calls() if call.name in names]
        ((at, own),) = [(at, call[1][0]) for at, call in enumerate(calls) if call[0] == "cuEventRecord"]
        assert at == 2
        assert calls == [
            ("cuStreamWaitEvent", (first, events[second])),
            ("cuStreamWaitEvent", (first, events[third])),
            ("cuEventRecord", (own, first)),
            ("cuStreamWaitEvent", (second, own)),
            ("cuStreamWaitEvent", (third, own)),
        ]
        await quickly(aiocuda.gather(*operations, joined))


async def test_refused_wait_of_a_barrier_fails_it_and_skips_later_work(fake: Fake) -> None:
    async with opened(fake) as device, aiocuda.StreamGroup(device, 3) as group:
        for _ in range(2):
            await quickly(aiocuda.gather(*(stream.launch(EMPTY, 1, 1) for stream in group), group.barrier()))
        for stream in group:
            stream.launch(EMPTY, 1, 1)
        fake.answer("cuStreamWaitEvent", OUT_OF_MEMORY, times=2)  # a wait in C, and its repetition by the driver
        joined = group.barrier()
        fake.answer("cuStreamWaitEvent", 0, times=0)
        later = [stream.launch(EMPTY, 1, 1) for stream in group]
        with pytest.raises(DeviceOutOfMemory, match="cuStreamWaitEvent"):
            await quickly(joined.wait())
        for operation in later:
            with pytest.raises(SkippedError):
                await quickly(operation.wait())


async def test_refused_wait_fails_the_item(fake: Fake) -> None:
    def compute(slot: aiocuda.Slot) -> Any:
        if slot.item == 30 and slot.stream.name == "first":
            fake.answer("cuStreamWaitEvent", OUT_OF_MEMORY, times=1)
        return slot.stream.launch(EMPTY, 1, 1)

    stages = [aiocuda.Stage(name, compute) for name in ("first", "second")]
    async with opened(fake) as device, aiocuda.Pipeline(device, stages, 1) as pipeline:
        with pytest.raises(DeviceOutOfMemory, match="cuStreamWaitEvent") as failed:
            async for item in _numbered(pipeline.run(range(40))):
                assert item <= 30
        assert failed.value.__notes__ == ["in stage 'second' of item 30, counted from 0"]


async def test_refused_launch_fails_and_skips_what_follows(fake: Fake) -> None:
    async with opened(fake) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        fake.answer("cuLaunchKernelEx", OUT_OF_MEMORY, times=1)
        fake.forget()
        failing, skipped = stream.launch(EMPTY, 1, 1), stream.launch(EMPTY, 1, 1)
        with pytest.raises(DeviceOutOfMemory, match="cuLaunchKernelEx"):
            await quickly(failing.wait())
        with pytest.raises(SkippedError):
            await quickly(skipped.wait())
        assert len(fake.calls("cuLaunchKernelEx")) == 1
        await quickly(stream.launch(EMPTY, 1, 1))  # the failure was delivered


async def test_refused_record_fails_after_the_work_was_accepted(fake: Fake) -> None:
    """The memory of the work is held until an event that was recorded later is done."""
    async with opened(fake) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        fake.answer("cuEventRecord", OUT_OF_MEMORY)
        failing = stream.launch(EMPTY, 1, 1)
        fake.answer("cuEventRecord", 0, times=0)
        with pytest.raises(DeviceOutOfMemory, match="cuEventRecord"):
            await quickly(failing.wait())
        await quickly(stream.synchronize())
        assert stream._queue.idle


async def test_full_stream_makes_no_call(fake: Fake) -> None:
    async with opened(fake, max_in_flight=2) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        fake.answer("cuEventQuery", NOT_READY)
        fake.forget()
        operations = [stream.launch(EMPTY, 1, 1) for _ in range(5)]
        assert len(fake.calls("cuLaunchKernelEx")) == 2
        assert [operation.state for operation in operations] == ["submitted"] * 2 + ["queued"] * 3
        fake.answer("cuEventQuery", 0, times=0)
        await quickly(aiocuda.gather(*operations))
        assert len(fake.calls("cuLaunchKernelEx")) == 5


@pytest.mark.parametrize(
    ("seconds", "others_wait", "lingers"),
    [(0.1, False, True), (2.0, False, True), (2.0, True, False), (5.0, False, False), (9.0, False, False)],
)
async def test_await_lingers_up_to_the_predicted_end(
    fake: Fake, seconds: float, others_wait: bool, lingers: bool
) -> None:
    """Only where the end is predicted within the limit, which is half as long while other streams have waiters."""
    policy = dataclasses.replace(CompletionPolicy.named("latency"), linger=3.0)
    async with opened(fake, policy=policy) as device:
        stream, other = device.stream(), device.stream()
        for each in (stream, other):
            await quickly(each.launch(EMPTY, 1, 1))
        fake.answer("cuEventQuery", NOT_READY)
        waiters = []
        if others_wait:
            waiting = other.launch(EMPTY, 1, 1)
            stream_operation(waiting).estimate = None  # its end is not known, so its await suspends
            waiters.append(asyncio.create_task(waiting.wait()))
            await asyncio.sleep(0)
        operation = stream_operation(stream.launch(EMPTY, 1, 1))
        assert operation.estimate is not None
        operation.estimate.seconds = seconds
        event = fake.calls("cuEventRecord")[-1].arguments[0]
        fake.answer("cuEventQuery", NOT_READY, times=4)
        fake.forget()
        waiters.append(asyncio.create_task(operation.wait()))
        await asyncio.sleep(0)
        queries = [call for call in fake.calls("cuEventQuery") if call.arguments[0] == event]
        assert operation.done() is lingers
        assert (len(queries) > 4) is lingers
        fake.answer("cuEventQuery", 0, times=0)
        await quickly(asyncio.gather(*waiters))


async def test_await_behind_long_operations_does_not_linger(fake: Fake) -> None:
    """The predicted end of a long operation counts from the unresolved operations before it, so it is in the past."""
    policy = dataclasses.replace(CompletionPolicy.named("latency"), linger=3.0)
    async with opened(fake, policy=policy) as device:
        stream = device.stream()
        await quickly(stream.launch(EMPTY, 1, 1))
        operation = stream_operation(stream.launch(EMPTY, 1, 1))
        assert operation.estimate is not None
        operation.estimate.seconds = 9.0
        operation.submitted_at = stream._queue.last_resolved = time.monotonic() - 100
        fake.answer("cuEventQuery", NOT_READY, times=4)
        fake.forget()
        waiter = asyncio.create_task(operation.wait())
        await asyncio.sleep(0)
        assert len(fake.calls("cuEventQuery")) == 1
        await quickly(waiter)


async def test_signal_ends_a_long_linger(fake: Fake) -> None:
    """Queries in C run no bytecode, so a `linger` of two minutes would delay Ctrl-C for that time."""

    class SignalError(Exception):
        pass

    def handle(*_: object) -> None:
        raise SignalError

    policy = dataclasses.replace(CompletionPolicy.named("latency"), linger=2 * PATIENCE)
    async with opened(fake, policy=policy) as device:
        stream = device.stream()
        for _ in range(3):
            await quickly(stream.launch(EMPTY, 1, 1))
        operation = stream_operation(stream.launch(EMPTY, 1, 1))
        fake.answer("cuEventQuery", NOT_READY)
        before = signal.signal(signal.SIGALRM, handle)
        try:
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(SignalError):
                stream._queue.linger(operation)
            assert time.monotonic() - began < PATIENCE
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            fake.answer("cuEventQuery", 0, times=0)
        await quickly(operation)


async def test_subclass_of_a_user_may_define_kind_and_id() -> None:
    """The public class names them in its text, also where they are attributes in C."""

    class Job(aiocuda.Operation[None]):
        kind = "job"
        label = None
        stream_name = "mine"
        state = "done"

        @property
        def id(self) -> int:  # type: ignore[override]  # it is writable in the public class
            return 7

    assert str(Job()) == "<Operation 7 job on mine: done>"


async def test_gil_is_released_if_the_variable_says_so(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_GIL", "release")
    async with opened(fake) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        fake.forget()
        await quickly(stream.launch(EMPTY, 1, 1))
        assert {call.kept_gil for call in fake.calls() if call.name in ("cuLaunchKernelEx", "cuEventRecord")} == {False}


async def test_stream_closed_with_work_in_flight(fake: Fake) -> None:
    """The stream is destroyed when its work is done. A launch after the close is refused before any call."""
    async with opened(fake) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        operation = stream.launch(EMPTY, 1, 1)
        await quickly(stream.aclose())
        assert operation.done()
        fake.forget()
        with pytest.raises(aiocuda.ClosedError):
            stream.launch(EMPTY, 1, 1)
        assert fake.calls() == []


_FORKS = """
import asyncio, os, sys
from pathlib import Path
import pytest
import aiocuda
from aiocuda._core._form import form
from aiocuda.completion._wait_rule import CompletionPolicy
from aiocuda._core import stream_operation
from tests.core.test_over_libcuda import EMPTY, opened
from tests.driver.cuda.fake import Fake

async def main():
    fake = Fake(Path(sys.argv[1]))
    fake.value("cuDeviceGetCount", 1)
    async with opened(fake) as device:
        stream = device.stream()
        await stream.launch(EMPTY, 1, 1)
        pending = stream.launch(EMPTY, 1, 1)
        fake.forget()
        child = os.fork()
        if not child:
            status = 1
            try:
                try:
                    operation = stream.launch(EMPTY, 1, 1)
                    await operation
                except aiocuda.ForkedProcessError:
                    assert not [call for call in fake.calls() if "Launch" in call.name], fake.names()
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        await pending

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
async def test_forked_child_makes_no_call(library: Path) -> None:
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs
        [sys.executable, "-W", "ignore", "-c", _FORKS, str(library)],
        env={**os.environ, "PYTHONPATH": path, "AIOCUDA_CORE": form().name},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


async def test_free_threaded_python_is_refused_with_cuda_and_not_without(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(UnsupportedError, match="free-threaded Python is not tested: run with PYTHON_GIL=1"):
        await quickly(aiocuda.open_device(driver=CudaDriver(fake.path)))
    async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
        assert (await quickly(stream.download(await stream.upload(np.arange(4))))).tolist() == [0, 1, 2, 3]


async def test_float_that_its_parameter_cannot_hold_is_refused_by_each_launch(fake: Fake) -> None:
    fake.parameters((0, 8), (8, 4), (12, 4))
    async with opened(fake) as device:
        stream = device.stream()
        buffer = stream.empty(4, np.float32)
        for _ in range(3):
            await stream.launch(SCALE, 1, 1, buffer, float("inf"), 0)
            with pytest.raises(InvalidArgumentError, match="1e\\+300"):
                stream.launch(SCALE, 1, 1, buffer, 1e300, 0)


async def test_fault_where_the_first_callback_of_a_gathering_begins_the_wait_calls_it(fake: Fake) -> None:
    fake.answer("cuEventQuery", NOT_READY)
    async with opened(fake, policy="efficient") as device:
        streams = [device.stream() for _ in range(2)]
        gathering = aiocuda.gather(*[stream.launch(EMPTY, 1, 1) for stream in streams])
        fake.answer("cuStreamWaitEvent", ILLEGAL_ADDRESS)  # of the side stream of a notifier
        called = asyncio.Event()
        gathering.add_done_callback(lambda _: called.set())
        await quickly(called.wait())
        assert isinstance(gathering.exception(), DeviceFault)
        for stream in streams:
            await stream.aclose()
