"""Labels name operations in errors, log events and listeners, and belong to the task that enqueues."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import AsyncCoordinator, Device, InvalidArgumentError, InvalidTypeError, Kernel, Stream
from aiocuda.driver.host import HostDriver
from tests.helpers import Latch, open_peer, quickly
from tests.stream.methods import LABELLED, World, methods_of, operation_of

pytestmark = pytest.mark.asyncio

HOSTILE = [
    "\"quotes\" 'and' `more`",
    "<script>alert(1)</script>",
    "a\x00b\n\r\x1b[31m\u2028\u202e",
    "\ud800",
    "x" * 100_000,
]

nothing = Kernel("nothing", source='extern "C" __global__ void nothing(float* x) {}', host=lambda x: None)
failing = Kernel("failing", source='extern "C" __global__ void failing() { __trap(); }', host=lambda: 1 / 0)


async def test_a_block_labels_the_operations_of_its_task(stream: Stream) -> None:
    before = stream.synchronize()
    with aiocuda.label("request-17"):
        outer = stream.synchronize()
        with aiocuda.label("stage"):
            inner = stream.synchronize()
        again = stream.synchronize()
    after = stream.synchronize()
    labels = [each.label for each in (before, outer, inner, again, after)]
    assert labels == [None, "request-17", "stage", "request-17", None]
    await quickly(after)
    assert outer.label == "request-17"  # also when it has finished


async def test_an_exception_ends_the_label(stream: Stream) -> None:
    with pytest.raises(ZeroDivisionError), aiocuda.label("request-17"):
        raise ZeroDivisionError
    assert stream.synchronize().label is None


async def test_tasks_have_labels_of_their_own(device: Device) -> None:
    async def request(name: str) -> str | None:
        with aiocuda.label(name):
            async with device.stream() as stream:
                await asyncio.sleep(0)
                return stream.synchronize().label

    with aiocuda.label("the service"):
        labels = await asyncio.gather(*(request(f"request-{number}") for number in range(5)))
        inherited = await asyncio.create_task(_label_of(device))
    assert labels == [f"request-{number}" for number in range(5)]
    assert inherited == "the service"


async def _label_of(device: Device) -> str | None:
    async with device.stream() as stream:
        return stream.synchronize().label


async def test_every_method_of_a_stream_takes_a_label(device: Device, stream: Stream, other: Stream) -> None:
    world = await World.make(device, stream, other)
    for name, run in methods_of(world).items():
        if name in LABELLED:
            assert operation_of(run(label="x")).label == "x", name
    plain = stream.fill(world.buffer, 1)
    assert plain.label is None
    await quickly(plain)


async def test_a_launch_that_is_bound_takes_a_label(stream: Stream) -> None:
    """The first launch of a kernel waits for its load, the second binds it, later ones take the short way."""
    buffer = await stream.upload(np.zeros(4, np.float32))
    labels = [stream.launch(nothing, 1, 1, buffer, label=f"launch-{number}").label for number in range(4)]
    with aiocuda.label("block"):
        labels += [stream.launch(nothing, 1, 1, buffer).label, stream.launch(nothing, 1, 1, buffer, label="own").label]
    assert labels == ["launch-0", "launch-1", "launch-2", "launch-3", "block", "own"]
    await quickly(stream.synchronize())


async def test_nodes_of_a_coordinator_have_labels(device: Device) -> None:
    async with AsyncCoordinator(device, max_in_flight=1) as coordinator:
        first = coordinator.upload(np.zeros(4, np.float32), label="upload")
        second = coordinator.compute(nothing, 1, 1, first, label="compute")  # it waits for a place
        with aiocuda.label("block"):
            third = coordinator.download(first)
            labels: list[str | None] = []
            host = coordinator.host(lambda: labels.append(_current_label()), after=third, label="host")
        async with coordinator.operation("kernel", label="bracket") as bracket:
            assert bracket.stream is not None
            inside = bracket.stream.synchronize()
        outside = coordinator.compute_stream.synchronize()
        await quickly(host)
    assert [node.label for node in (first, second, third, host, bracket)] == (
        ["upload", "compute", "block", "host", "bracket"]
    )
    operations = [None if node.operation is None else node.operation.label for node in (first, second, third)]
    assert operations == ["upload", "compute", "block"]
    assert labels == ["host"]
    assert (inside.label, outside.label) == ("bracket", None)
    assert "'compute'" in repr(second)


def _current_label() -> str | None:
    from aiocuda._base._label import LABEL

    return LABEL.get()


@pytest.mark.parametrize("text", HOSTILE, ids=["quotes", "script", "control", "surrogate", "long"])
async def test_errors_show_the_label_in_one_short_line(text: str) -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        peer.refuse("fill")
        with aiocuda.label(text):
            with pytest.raises(aiocuda.DriverError):
                await quickly(stream.fill(buffer, 1))
            failed = stream.fill(buffer, 1)
        shown = repr(failed)
        assert failed.label == text
        assert len(shown) < 400
        assert shown.isprintable()
        shown.encode("utf-8")


async def test_a_skipped_operation_names_the_label_of_the_failed_one() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        peer.refuse("fill")
        stream.fill(buffer, 1, label="request-17")
        with pytest.raises(aiocuda.SkippedError, match=r"fill 'request-18' on .* was not run: .*fill 'request-17' on"):
            await quickly(stream.fill(buffer, 1, label="request-18"))


async def test_log_events_have_the_label(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiocuda")
    driver = HostDriver()
    async with aiocuda.open_device(driver=driver) as device:
        stream = device.stream()
        with pytest.raises(aiocuda.DeviceFault, match="launch 'request-17'"):
            await quickly(stream.launch(failing, 1, 1, label="request-17"))
        (record,) = [each for each in caplog.records if "device_fault" in each.getMessage()]
        assert vars(record)["label"] == "request-17"


@pytest.mark.parametrize("text", HOSTILE, ids=["quotes", "script", "control", "surrogate", "long"])
async def test_a_label_is_one_short_line_in_a_log_event(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiocuda")
    async with aiocuda.open_device(driver=HostDriver()) as device:
        stream = device.stream()
        with aiocuda.label(text), pytest.raises(aiocuda.DeviceFault):
            await quickly(stream.launch(failing, 1, 1))
        (record,) = [each for each in caplog.records if "device_fault" in each.getMessage()]
        label = vars(record)["label"]
        assert label.isprintable()
        assert len(label) < 500


async def test_wrong_labels_are_refused(device: Device, stream: Stream) -> None:
    wrong: Any
    for wrong in (7, b"bytes", object()):
        with pytest.raises(InvalidTypeError, match=f"a label is a str, not {type(wrong).__name__}"):
            with aiocuda.label(wrong):
                raise AssertionError("it was accepted")
        with pytest.raises(InvalidTypeError, match="a label is a str"):
            stream.synchronize(label=wrong)
        await quickly(stream.launch(nothing, 1, 1, stream.empty(4)))
        with pytest.raises(InvalidTypeError, match="a label is a str"):
            stream.launch(nothing, 1, 1, stream.empty(4), label=wrong)
        with pytest.raises(InvalidTypeError, match="a label is a str"):
            AsyncCoordinator(device).upload(np.zeros(4), label=wrong)
    with pytest.raises(InvalidArgumentError, match="must not be empty"), aiocuda.label(""):
        raise AssertionError("it was accepted")
    with pytest.raises(InvalidArgumentError, match="must not be empty"):
        stream.synchronize(label="")


async def test_a_refused_operation_leaves_no_label_behind(stream: Stream) -> None:
    with pytest.raises(InvalidTypeError):
        stream.upload("text", label="request-17")
    assert stream.synchronize().label is None


async def test_the_function_of_submit_takes_a_keyword_named_label(stream: Stream, latch: Latch) -> None:
    def function(*, label: str) -> str:
        return label

    operation = stream.submit(function, label="of the function")
    assert await quickly(operation) == "of the function"
    assert operation.label is None
