"""The messages in docs/how-to/troubleshooting.md are those of the library.

A quoted message, such as ``BusyError: … is writing this``, is a class and the parts of its text. Each is raised here
on the host driver. Messages that need a GPU or a fork are looked for in the source.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda.driver.host import HostDriver
from aiocuda.observe import Timeline
from aiocuda.serving import MicroBatcher
from tests.bad_input import service_mistakes
from tests.bad_input.newcomers import MISTAKES, At
from tests.helpers import Latch
from tests.project.tree import PACKAGE, ROOT

PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"

MESSAGE = re.compile(r"`(\w+(?:Error|Warning|Fault|OutOfMemory))(?:: ([^`]+))?`")

#: They need a GPU, a fork, a machine without a GPU, or ranks of PyTorch; by class and the first words of the text.
ELSEWHERE = {
    "CompileError: kernel … does not compile for",
    "DeviceOutOfMemory: … cuDevicePrimaryCtxRetain",
    "DriverNotAvailableError: CUDA is not available",
    "ForkedProcessError: … was opened before fork()",
    "RuntimeWarning: shard=(…) on rank … of torch.distributed",
    "HostDriverWarning: no GPU is used, work runs on the host driver",
}


def symptoms() -> Iterator[tuple[str, str]]:
    """Yield class and text of each message in the first column."""
    for row in re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        yield from MESSAGE.findall(row)


SYMPTOMS = sorted(set(symptoms()))
QUOTED = {f"{name}: {text}" for name, text in SYMPTOMS if text}


def agrees(message: str, text: str) -> bool:
    """Return whether a message has the parts of a quoted text, in order."""
    return re.search(".*".join(map(re.escape, text.split("…"))), message, re.DOTALL) is not None


Stream = Any


async def busy(device: aiocuda.Device, stream: Stream) -> None:
    out, buffer = np.empty(4, np.float32), stream.empty(4)
    with Latch(device) as latch:
        latch.hold(stream)
        download = stream.download(buffer, out=out)
        try:
            stream.upload(out)
        finally:
            latch.release()
            await download


async def operation_for_a_buffer(device: aiocuda.Device, stream: Stream) -> None:
    upload = stream.upload(np.zeros(3))
    try:
        stream.fill(upload, 1)
    finally:
        await upload


async def device_memory(device: aiocuda.Device, stream: Stream) -> None:
    np.asarray(stream.empty(4))


async def dtypes(device: aiocuda.Device, stream: Stream) -> None:
    stream.copy(stream.empty(4), np.zeros(4))


async def freed(device: aiocuda.Device, stream: Stream) -> None:
    buffer = stream.empty(4)
    buffer.free()
    stream.fill(buffer, 1)


async def closed(device: aiocuda.Device, stream: Stream) -> None:
    async with device.stream() as other:
        buffer = other.empty(4)
    other.fill(buffer, 1)


async def another_loop(device: aiocuda.Device, stream: Stream) -> None:
    buffer, raised = stream.empty(4), []

    async def fill() -> None:
        stream.fill(buffer, 1)

    def run() -> None:
        try:
            asyncio.run(fill())
        except aiocuda.AiocudaError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    raise raised[0]


async def deadlock(device: aiocuda.Device, stream: Stream) -> None:
    async with aiocuda.StreamPool(device, maximum=1) as pool, pool.stream(exclusive=True), pool.stream(exclusive=True):
        pass


async def no_host_implementation(device: aiocuda.Device, stream: Stream) -> None:
    await stream.launch(aiocuda.Kernel("k", source='extern "C" __global__ void k() {}'), 1, 1)


def _broken() -> None:
    raise ValueError("broken")


async def fault(device: aiocuda.Device, stream: Stream) -> None:
    kernel = aiocuda.Kernel("k", source='extern "C" __global__ void k() {}', host=_broken)
    await stream.launch(kernel, 1, 1)


async def out_of_memory(device: aiocuda.Device, stream: Stream) -> None:
    stream.empty(1 << 24)


async def host_out_of_memory(device: aiocuda.Device, stream: Stream) -> None:
    device.pinned(1 << 56, np.uint8)


async def overloaded(device: aiocuda.Device, stream: Stream) -> None:
    gate = asyncio.Event()

    async def echo(batch: Any) -> list[Any]:
        await gate.wait()
        return list(batch.items)

    async with MicroBatcher(echo, max_batch_size=1, max_queued_requests=1, device=device) as batcher:
        futures = [batcher.submit_nowait(0)]
        try:
            futures.extend(batcher.submit_nowait(number) for number in range(1, 4))
        finally:
            gate.set()
            await asyncio.gather(*futures)


async def unclosed(device: aiocuda.Device, stream: Stream) -> None:
    device.stream()


async def unordered(device: aiocuda.Device, stream: Stream) -> None:
    async with device.stream() as other:
        buffer = stream.empty(4)
        stream.fill(buffer, 1)
        other.fill(buffer, 2)


async def source_written(device: aiocuda.Device, stream: Stream) -> None:
    array = np.zeros(4, np.float32)
    uploaded = stream.upload(array)
    array[:] = 1
    await uploaded


async def task_of_an_operation(device: aiocuda.Device, stream: Stream) -> None:
    await asyncio.create_task(stream.synchronize())


async def name_of_a_subpackage(device: aiocuda.Device, stream: Stream) -> None:
    getattr(aiocuda, "DataLoader")  # noqa: B009 - a type checker reports it


async def import_of_a_subpackage(device: aiocuda.Device, stream: Stream) -> None:
    from aiocuda import DataLoader  # type: ignore[attr-defined]  # noqa: F401


async def keyword_of_another_library(device: aiocuda.Device, stream: Stream) -> None:
    aiocuda.Kernel("k", source="", ptx="")  # type: ignore[call-arg]


class WithoutReaders(asyncio.SelectorEventLoop):
    def add_reader(self, *arguments: object) -> None:
        raise NotImplementedError


async def loop_without_readers(device: aiocuda.Device, stream: Stream) -> None:
    async def open_device() -> None:
        await aiocuda.open_device(driver="host")

    def run() -> None:
        with asyncio.Runner(loop_factory=WithoutReaders) as runner:
            runner.run(open_device())

    await asyncio.to_thread(run)


async def label_without_a_block(device: aiocuda.Device, stream: Stream) -> None:
    aiocuda.label("x")


async def await_of_a_buffer(device: aiocuda.Device, stream: Stream) -> None:
    await stream.empty(4)


async def capture_of_nothing(device: aiocuda.Device, stream: Stream) -> None:
    async with stream.capture():
        pass


async def timeline_without_a_block(device: aiocuda.Device, stream: Stream) -> None:
    Timeline(device).to_html()


async def missing_argument(device: aiocuda.Device, stream: Stream) -> None:
    stream.fill(stream.empty(4))


async def array_outlives_the_device(device: aiocuda.Device, stream: Stream) -> None:
    KEPT.append(device.unified(4).array)


async def mistake(name: str, device: aiocuda.Device, stream: Stream) -> None:
    """Make a mistake of newcomers."""
    buffer = stream.empty(4)
    result = MISTAKES[name][0](At(device, stream, buffer, stream.fill(buffer, 1), stream.record()))
    if inspect.iscoroutine(result):
        await result


async def service_mistake(name: str, device: aiocuda.Device, stream: Stream) -> None:
    """Make a mistake of newcomers with a service."""
    result = service_mistakes.MISTAKES[name][0](service_mistakes.At(device, stream))
    if inspect.iscoroutine(result):
        await result


#: Arrays that live on when their device is closed.
KEPT: list[object] = []

PROGRAMS: list[Callable[[aiocuda.Device, Stream], Awaitable[None]]] = [
    *(busy, operation_for_a_buffer, device_memory, dtypes, freed, closed, another_loop, deadlock),
    *(no_host_implementation, fault, out_of_memory, host_out_of_memory, overloaded, unclosed, unordered),
    source_written,
    *(task_of_an_operation, name_of_a_subpackage, import_of_a_subpackage, keyword_of_another_library),
    *(capture_of_nothing, timeline_without_a_block, missing_argument),
    *(loop_without_readers, label_without_a_block, await_of_a_buffer, array_outlives_the_device),
    *(functools.partial(mistake, name) for name in MISTAKES),
    *(functools.partial(service_mistake, name) for name in service_mistakes.MISTAKES),
]


async def messages_of(program: Callable[[aiocuda.Device, Stream], Awaitable[None]]) -> list[str]:
    """Return the error and the warnings of a program, each as ``class: text``."""
    driver, found = HostDriver(memory=1 << 24), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            async with aiocuda.open_device(driver=driver, check=True) as device:
                async with device.stream() as stream:
                    await program(device, stream)
        except (aiocuda.AiocudaError, AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        finally:
            driver.close()
    return found + [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@pytest.mark.slow
def test_each_message_is_raised() -> None:
    async def outside_of_a_loop() -> list[str]:
        return [message for program in PROGRAMS for message in await messages_of(program)]

    messages = asyncio.run(outside_of_a_loop())
    try:
        aiocuda.open_device(driver="host").__aenter__().send(None)
    except aiocuda.NoEventLoopError as error:
        messages.append(f"NoEventLoopError: {error}")
    missing = [quoted for quoted in QUOTED - ELSEWHERE if not any(agrees(message, quoted) for message in messages)]
    assert missing == [], "\n".join(messages)


def test_messages_of_other_machines_are_in_the_source() -> None:
    assert ELSEWHERE - QUOTED == set()
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    parts = [part.strip() for quoted in ELSEWHERE for part in quoted.partition(": ")[2].split("…")]
    assert [part for part in parts if part not in source] == []


def test_each_class_exists() -> None:
    public = {*aiocuda.errors.__all__, *dir(aiocuda.serving)}
    public |= {"AttributeError", "ImportError", "ResourceWarning", "RuntimeWarning", "TypeError", "ValueError"}
    public |= {"PytestUnraisableExceptionWarning"}  # pytest's
    assert {name for name, _ in SYMPTOMS} - public == set()
