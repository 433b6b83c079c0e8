"""Hooks run in the context of the task that enqueued the operation, whichever task or callback submits it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, Kernel, Operation, Pipeline, Stage, Stream
from aiocuda.driver.host import HostDriver
from tests.helpers import Latch, open_peer, quickly

pytestmark = pytest.mark.asyncio

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


class Requests:
    """Records, for each hook, the request in whose context it ran."""

    def __init__(self) -> None:
        self.submitted: dict[int, str] = {}
        self.resolved: dict[int, str] = {}

    def on_submit(self, operation: Operation[Any]) -> None:
        self.submitted[operation.id] = REQUEST.get()

    def on_resolve(self, operation: Operation[Any], start: int, end: int) -> None:
        assert operation.id not in self.resolved
        self.resolved[operation.id] = REQUEST.get()

    def of(self, operation: Operation[Any]) -> tuple[str | None, str | None]:
        return self.submitted.get(operation.id), self.resolved.get(operation.id)


async def in_task(name: str, function: Any) -> Any:
    """Call a function in a task of its own, whose request has this name."""

    async def work() -> Any:
        REQUEST.set(name)
        return function()

    return await asyncio.create_task(work())


async def test_operations_of_several_tasks_on_one_stream(device: Device, stream: Stream, latch: Latch) -> None:
    requests = Requests()
    with device.listen(requests):
        latch.hold(stream)
        operations = {name: await in_task(name, stream.synchronize) for name in "abc"}
        await latch.held()
        latch.release()
        await quickly(stream.synchronize())
    for name, operation in operations.items():
        assert requests.of(operation) == (name, name)


async def test_a_staged_copy_and_its_chunks(device: Device, stream: Stream) -> None:
    """Chunks are submitted by callbacks of the loop, as staging buffers become free."""
    array = np.zeros(32 << 20, np.uint8)
    requests = Requests()
    with device.listen(requests):
        upload = await in_task("a", lambda: stream.upload(array))
        await in_task("b", stream.synchronize)
        await quickly(upload)
        await quickly(stream.synchronize())
    assert requests.of(upload) == ("a", "a")
    assert set(requests.submitted.values()) == {"a", "b", "none"}
    assert sorted(requests.submitted.values()).count("b") == sorted(requests.submitted.values()).count("none") == 1


async def test_a_launch_that_waits_for_its_kernel(device: Device, stream: Stream) -> None:
    kernel = Kernel("loads", source='extern "C" __global__ void loads() {}', host=lambda: None)
    requests = Requests()
    with device.listen(requests):
        launch = await in_task("a", lambda: stream.launch(kernel, 1, 1))
        await in_task("b", stream.synchronize)
        await quickly(launch)
    assert requests.of(launch) == ("a", "a")


async def test_operations_in_the_host_queue_of_a_full_stream() -> None:
    async with aiocuda.open_device(driver=HostDriver(), max_in_flight=2) as device:
        stream = device.stream()
        requests = Requests()
        with Latch(device) as latch, device.listen(requests):
            latch.hold(stream)
            await latch.held()
            operations = {str(number): await in_task(str(number), stream.synchronize) for number in range(6)}
            assert operations["5"].state == "queued"
            latch.release()
            await quickly(operations["5"])
        for name, operation in operations.items():
            assert requests.of(operation) == (name, name)


async def test_a_function_of_submit_that_waits(device: Device, stream: Stream) -> None:
    requests = Requests()
    with device.listen(requests):
        submissions = {name: await in_task(name, lambda: stream.submit(REQUEST.get)) for name in "abcdef"}
        for name, operation in submissions.items():
            assert await quickly(operation) == name
    for name, operation in submissions.items():
        assert requests.of(operation) == (name, name)


async def test_nodes_that_wait_for_a_place_or_a_prerequisite(device: Device) -> None:
    kernel = Kernel("nop", source='extern "C" __global__ void nop(float* x) {}', host=lambda x: None)
    requests = Requests()
    host: list[str] = []
    with device.listen(requests):
        async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
            upload = await in_task("a", lambda: coordinator.upload(np.zeros(4, np.float32)))
            nodes = {name: await in_task(name, lambda: coordinator.compute(kernel, 1, 1, upload)) for name in "bcdef"}
            await in_task("g", lambda: coordinator.host(lambda: host.append(REQUEST.get()), after=nodes["f"]))
    assert requests.of(upload.operation) == ("a", "a")
    for name, node in nodes.items():
        assert requests.of(node.operation) == (name, name)
    assert host == ["g"]


async def test_stages_of_a_pipeline(device: Device) -> None:
    async def source() -> AsyncIterator[int]:
        for number in range(4):
            yield number

    def fill(slot: Any) -> Any:
        return slot.stream.fill(slot.buffer("x", 4, np.float32), slot.item)

    requests = Requests()
    REQUEST.set("run")
    with device.listen(requests):
        async for _ in Pipeline(device, [Stage("fill", fill)], depth=2).run(source()):
            pass
    assert set(requests.submitted.values()) == set(requests.resolved.values()) == {"run"}


async def test_abandoned_and_failed_operations_are_resolved_in_their_context() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        requests = Requests()
        with device.listen(requests):
            peer.refuse("fill")
            failed = await in_task("a", lambda: stream.fill(buffer, 1))
            skipped = await in_task("b", stream.synchronize)
            with pytest.raises(aiocuda.DriverError):
                await quickly(failed)
            with pytest.raises(aiocuda.SkippedError):
                await quickly(skipped)
            abandoned = await in_task("c", stream.synchronize)
            abandoned.abandon()
            await quickly(stream.synchronize())
        assert requests.of(failed) == (None, "a")
        assert requests.of(skipped) == (None, "b")
        assert requests.of(abandoned) == ("c", "c")


async def test_a_fault_resolves_every_operation_once() -> None:
    failing = Kernel("failing", source='extern "C" __global__ void failing() { __trap(); }', host=lambda: 1 / 0)
    async with aiocuda.open_device(driver=HostDriver(), max_in_flight=3) as device:
        stream, beside = device.stream(), device.stream()
        await device.load(failing)
        requests = Requests()
        with Latch(device) as latch, device.listen(requests):
            latch.hold(stream)
            await latch.held()
            operations = [await in_task(str(number), stream.synchronize) for number in range(6)]  # three on the host
            fault = await in_task("fault", lambda: beside.launch(failing, 1, 1))
            with pytest.raises(aiocuda.DeviceFault):
                await quickly(fault)
            with pytest.raises(aiocuda.DeviceFault):
                await quickly(operations[-1])
            latch.release()
        assert requests.resolved[fault.id] == "fault"
        assert [requests.resolved[each.id] for each in operations] == [str(number) for number in range(6)]


async def test_a_hook_may_enqueue_although_it_should_not(device: Device, stream: Stream) -> None:
    """The hook of the operation that it enqueues runs inside the hook that enqueues it."""
    seen: list[str] = []

    class Enqueues:
        def on_submit(self, operation: Operation[Any]) -> None:
            seen.append(operation.kind)
            if operation.kind == "fill":
                stream.synchronize()

    with device.listen(Enqueues()):
        await in_task("a", lambda: stream.fill(stream.empty(4), 1))
        await quickly(stream.synchronize())
    assert seen.count("fill") == 1
    assert seen.count("synchronize") == 2
