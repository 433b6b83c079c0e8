"""K1: the profiler, on and off, by stream and by name."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, ClosedError, Device, DeviceFault, DriverError, InvalidTypeError, Kernel, Stream
from aiocuda.observe import (
    LabelProfile,
    OperationProfile,
    ProfileReport,
    StreamProfile,
    StreamProfiler,
    Timeline,
    _profiler,
)
from aiocuda.observe._profiler import ACCURACY, LogHistogram
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.helpers import AFFINE, TRAP, Latch, in_thread, open_peer, quickly

NBYTES = 4096


def named(stream: StreamProfile) -> dict[str, OperationProfile]:
    """Its operations, by name."""
    return {each.name: each for each in stream.operations}


async def profiled(device: Device, work: Callable[[], Any]) -> ProfileReport:
    async with StreamProfiler(device) as _profiler:
        work()
    return _profiler.report()


def work(stream: Stream, times: int = 1) -> None:
    """Of each usual kind one operation, and so many launches."""
    buffer = stream.upload(np.zeros(NBYTES // 4, np.uint32))
    target = stream.empty(NBYTES // 4, np.uint32)
    for _ in range(times):
        stream.launch(AFFINE, 4, 256, target, NBYTES // 4, 3, 1)
    stream.fill(target, 7)
    stream.copy(target, stream.empty_like(target))
    stream.download(target[: NBYTES // 8])
    stream.wait(buffer)


@pytest.mark.asyncio
async def test_the_report_lists_each_stream_by_name(device: Device, stream: Stream, other: Stream) -> None:
    async with StreamProfiler(device) as _profiler:
        work(stream, times=3)
        other.launch(AFFINE, 4, 256, other.empty(1024, np.uint32), 1024, 3, 1)
        other.record()
        other.record(timing=True)
    report = _profiler.report()
    assert (report.device, report.driver, report.untimed) == (device.name, device.driver.name, 0)
    streams = {each.name: each for each in report.streams}
    assert set(streams) == {"left", "right"}
    left = named(streams["left"])
    assert {name: (each.kind, each.count, each.nbytes) for name, each in left.items()} == {
        "upload": ("upload", 1, NBYTES),
        "affine": ("launch", 3, 0),
        "fill": ("fill", 1, NBYTES),
        "copy": ("copy", 1, NBYTES),
        "download": ("download", 1, NBYTES // 2),
        "wait": ("wait", 1, 0),
    }
    for each in itertools.chain(report.total.operations, *(stream.operations for stream in report.streams)):
        assert 0 <= each.min_ms <= each.mean_ms <= each.max_ms <= each.total_ms
        assert each.total_ms == pytest.approx(each.mean_ms * each.count)
    assert (streams["left"].kernels, streams["left"].transfers, streams["left"].transfer_bytes) == (3, 3, 2.5 * NBYTES)
    assert named(report.total)["affine"].count == 4
    assert named(streams["right"])["record"].count == 2
    assert report.total.busy_ms == pytest.approx(sum(each.busy_ms for each in report.streams))
    assert 0 < streams["left"].busy_ms * 1e-3 < report.seconds
    assert json.loads(json.dumps(report.to_dict()))["total"]["count"] == report.total.count == 11


def test_times_are_device_times() -> None:
    """In virtual time, where all of them are known."""
    kernel = Kernel("slow", source="__global__ void slow();", host=lambda: None, host_seconds=5e-3)

    async def main() -> ProfileReport:
        driver = SimulatedDriver(None, bandwidth=1e6, latency=0.0)
        async with aiocuda.open_device(driver=driver, policy="efficient") as device:
            await device.load(kernel)  # its launch would wait for the copy, on the host
            left, right = device.stream(name="left"), device.stream(name="right")
            pinned = await device.pinned(2000, np.uint8)
            buffer = left.empty_like(pinned)
            async with StreamProfiler(device) as _profiler:
                last = left.copy(buffer, pinned)
                for _ in range(3):
                    last = left.launch(kernel, 1, 1)
                right.wait(last)
                right.copy(pinned, buffer)
            return _profiler.report()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        report = runner.run(main())
    left, right = report.streams
    slow, upload = named(left)["slow"], named(left)["upload"]
    assert slow.count == 3
    assert (slow.total_ms, slow.mean_ms) == pytest.approx((15, 5), abs=0.1)
    assert upload.total_ms == pytest.approx(2, abs=0.1)
    assert upload.bandwidth == pytest.approx(1e6, rel=0.05)
    assert left.kernel_ms == slow.total_ms
    assert left.transfer_ms == upload.total_ms
    # It waited for the other one all the time, and that is no work.
    assert named(right)["wait"].total_ms == pytest.approx(17, abs=0.2)
    assert right.busy_ms == pytest.approx(2, abs=0.1)
    assert report.seconds == pytest.approx(19e-3, abs=2e-3)
    assert report.utilisation(left) == pytest.approx(17 / 19, abs=0.1)
    assert report.utilisation(report.total) == pytest.approx(1, abs=0.1)
    assert report.waits["failed"] == 0
    assert report.waits["parks"] + report.waits["sleeps"] + report.waits["polls"] > 0


@pytest.mark.asyncio
async def test_a_staged_copy_counts_once_and_all_its_bytes(device: Device, stream: Stream) -> None:
    array = np.arange(5 << 20, dtype=np.uint32)  # several chunks
    report = await profiled(device, lambda: stream.upload(array))
    (upload,) = report.total.operations
    assert (upload.name, upload.count, upload.nbytes) == ("upload", 1, array.nbytes)
    assert upload.total_ms > 0.053  # at 391 GB/s, which is more than any bus has


@pytest.mark.asyncio
async def test_the_first_launch_has_the_name_of_its_kernel(device: Device, stream: Stream) -> None:
    source = 'extern "C" __global__ void first(unsigned int* x) { *x = 1; }'
    kernel = Kernel("first", source=source, host=lambda x: x.fill(1))
    buffer = stream.empty(1, np.uint32)
    report = await profiled(device, lambda: [stream.launch(kernel, 1, 1, buffer) for _ in range(2)])
    assert [(each.name, each.kind, each.count) for each in report.total.operations] == [("first", "launch", 2)]


@pytest.mark.asyncio
async def test_outside_its_block_it_is_not_called() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        _profiler = StreamProfiler(device)

        async def records() -> int:
            before = peer.calls["event_record"]
            await quickly(stream.synchronize())
            return peer.calls["event_record"] - before

        assert await records() == 1
        async with _profiler:
            assert await records() == 2  # one before it
        timed = peer.calls["event_elapsed_ms"]
        assert timed == _profiler.report().total.count == 1
        assert await records() == 1
        assert peer.calls["event_elapsed_ms"] == timed
        assert _profiler.report().total.count == 1


@pytest.mark.asyncio
async def test_it_adds_up_from_block_to_block_until_it_is_reset(device: Device, stream: Stream) -> None:
    _profiler = StreamProfiler(device)
    with pytest.warns(RuntimeWarning, match=r"never entered.*`async with StreamProfiler\(device\) as profiler`"):
        report = _profiler.report()
    assert report.streams == ()
    assert report.utilisation(report.total) == 0
    for _ in range(2):
        async with _profiler:
            stream.synchronize()
    await stream.synchronize()
    first = _profiler.report()
    assert (first.total.count, repr(_profiler)) == (2, f"<StreamProfiler of {device.name}, off: 2 operations>")
    assert _profiler.report() == first
    async with _profiler:
        await quickly(stream.synchronize())
        during = _profiler.report()
        assert (during.total.count, repr(_profiler)) == (3, f"<StreamProfiler of {device.name}, on: 3 operations>")
        assert during.seconds > first.seconds
        began = device.driver.now()
        _profiler.reset()
        await quickly(stream.synchronize())
    assert _profiler.report().total.count == 1
    assert _profiler.report().seconds <= device.driver.now() - began
    assert first.total.count == 2


@pytest.mark.asyncio
async def test_a_profiler_listens_once_at_a_time(device: Device, stream: Stream) -> None:
    async with StreamProfiler(device) as _profiler, StreamProfiler(device) as another:
        with pytest.raises(BusyError, match=r"StreamProfiler.* listens to .* already: leave its block first"):
            await _profiler.__aenter__()
        await quickly(stream.synchronize())
    async with Timeline(device):
        await quickly(stream.synchronize())
    assert _profiler.report().total.count == another.report().total.count == 1
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match="not int"):
        StreamProfiler(wrong)


@pytest.mark.asyncio
async def test_earlier_and_failed_operations_are_untimed() -> None:
    async with open_peer() as (peer, device):
        stream = device.stream()
        buffer = stream.empty(4)
        with Latch(device) as latch:
            latch.hold(stream)
            await latch.held()
            async with StreamProfiler(device) as _profiler:
                behind = stream.synchronize()
                latch.release()
                await quickly(behind)
                peer.refuse("fill")
                with pytest.raises(DriverError):
                    await stream.fill(buffer, 1)
                stream.fill(buffer, 2)
        report = _profiler.report()
        assert {each.name: each.count for each in report.total.operations} == {"synchronize": 1, "fill": 1}
        assert report.untimed >= 2
        assert report.waits["failed"] == 1


@pytest.mark.asyncio
async def test_a_fault_leaves_what_was_counted_before_it() -> None:
    async with aiocuda.open_device(driver="host") as device:
        stream = device.stream()
        _profiler = StreamProfiler(device)

        async def fault() -> None:
            async with _profiler:
                await stream.synchronize()
                await stream.launch(TRAP, 1, 1)

        with pytest.raises(DeviceFault):
            await fault()
        assert [each.name for each in _profiler.report().total.operations] == ["synchronize"]
        with pytest.raises(DeviceFault):
            await _profiler.__aenter__()
        assert _profiler.report().total.count == 1


@pytest.mark.asyncio
async def test_a_device_closed_inside_or_before() -> None:
    async with aiocuda.open_device(driver="host") as device:
        _profiler = StreamProfiler(device)
        stream = device.stream()
        async with _profiler:
            await stream.synchronize()
            await device.aclose()
        assert _profiler.report().total.count == 1
        with pytest.raises(ClosedError, match="has been closed"):
            await _profiler.__aenter__()


@pytest.mark.asyncio
async def test_a_cancelled_exit_stops_listening(device: Device, stream: Stream, latch: Latch) -> None:
    async def block() -> None:
        async with StreamProfiler(device):
            latch.hold(stream)

    ending = asyncio.create_task(block())
    await latch.held()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quickly(ending)
    latch.release()
    async with StreamProfiler(device) as another:
        await quickly(stream.synchronize())
    assert named(another.report().total)["synchronize"].count == 1


@pytest.mark.asyncio
async def test_loops_of_other_threads_are_counted_too() -> None:
    count, threads = 200, 3
    async with aiocuda.open_device(driver="host") as device:

        async def elsewhere() -> None:
            async with device.stream(name="shared name") as stream:
                await aiocuda.gather(*(stream.synchronize() for _ in range(count)))

        async with StreamProfiler(device) as _profiler:
            await asyncio.gather(*(asyncio.to_thread(in_thread, elsewhere) for _ in range(threads)))
        (stream,) = _profiler.report().streams
        assert (stream.name, stream.count) == ("shared name", count * threads)


@pytest.mark.asyncio
async def test_memory_for_names_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_profiler, "MOST_ROWS", 3)
    async with aiocuda.open_device(driver="host") as device, StreamProfiler(device) as listening:
        for number in range(10):
            async with device.stream(name=f"request {number}") as stream:
                await quickly(stream.synchronize())
        report = listening.report()
    assert {each.name: each.count for each in report.streams} == {
        "request 0": 1,
        "request 1": 1,
        "request 2": 1,
        "…": 7,
    }


def test_percentiles_are_those_of_all_times() -> None:
    """In virtual time: 98 short kernels and 2 long ones."""

    async def main() -> ProfileReport:
        async with aiocuda.open_device(driver=SimulatedDriver(None, latency=0.0)) as device:
            left, right = device.stream(name="left"), device.stream(name="right")
            times = [1e-3] * 49 + [40e-3] + [2e-3] * 49 + [80e-3]
            source = "__global__ void k();"
            kernels = iter([Kernel("k", source=source, host=lambda: None, host_seconds=each) for each in times])
            async with StreamProfiler(device) as profiler:
                for stream in (left, right):
                    for _ in range(50):
                        stream.launch(next(kernels), 1, 1)
            return profiler.report()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        report = runner.run(main())
    left = named(next(each for each in report.streams if each.name == "left"))["k"]
    assert (left.p50_ms, left.p99_ms) == pytest.approx((1, 40), rel=0.02)
    total = named(report.total)["k"]
    assert (total.p50_ms, total.p99_ms, total.max_ms) == pytest.approx((2, 40, 80), rel=0.02)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_percentiles_have_the_stated_accuracy(spread: float) -> None:
    times = np.random.default_rng(7).lognormal(-3, spread, 5000)
    one, two = LogHistogram(), LogHistogram()
    for number, time in enumerate(times):
        (one if number % 3 else two).add(float(time))
    one.merge(two)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = float(np.quantile(times, share, method="inverted_cdf"))
        assert one.percentile(share) == pytest.approx(exact, rel=ACCURACY * 1.0001, abs=1e-4)


def test_percentiles_of_unusual_times() -> None:
    histogram = LogHistogram()
    for time in (0.0, 0.0, 1e300):
        histogram.add(time)
    assert histogram.percentile(0.5) == 0.0
    assert histogram.percentile(0.99) == pytest.approx(1e9, rel=ACCURACY)


@pytest.mark.asyncio
async def test_labels_have_figures_of_their_own(device: Device, stream: Stream, other: Stream) -> None:
    async with StreamProfiler(device) as profiler:
        for each in (stream, other):
            with aiocuda.label("both"):
                buffer = each.upload(np.zeros(NBYTES, np.uint8))
                each.wait(buffer)
        stream.fill(stream.empty(NBYTES, np.uint8), 1, label="one")
        stream.synchronize()
    labels = {each.label: each for each in profiler.report().labels}
    assert {name: each.count for name, each in labels.items()} == {"both": 4, "one": 1}
    uploads = named(profiler.report().total)["upload"].total_ms
    assert labels["both"].busy_ms == pytest.approx(uploads)
    assert json.loads(json.dumps(profiler.report().to_dict()))["labels"] == [
        dataclasses.asdict(each) for each in profiler.report().labels
    ]
    profiler.reset()
    assert profiler.report().labels == ()


@pytest.mark.asyncio
async def test_any_label_is_reported_and_memory_for_labels_is_limited(
    device: Device, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_profiler, "MOST_LABELS", 5)
    unusual = ['"quoted" <script>alert(1)</script>', "line\nline\x00\x1b[31m", "\udc80 alone", "x" * 100_000, "ü"]
    async with StreamProfiler(device) as profiler:
        for text in (*unusual, "sixth", "seventh"):
            stream.synchronize(label=text)
    report = profiler.report()
    assert {each.label for each in report.labels} == {*unusual[:3], "x" * 200 + "…", "ü", "…"}
    assert sum(each.count for each in report.labels) == 7
    text = str(report)
    text.encode()
    assert len(text) < 3000
    assert "\x1b" not in text
    assert all(line.isprintable() for line in text.splitlines())
    json.dumps(report.to_dict()).encode()


def test_text_shows_the_busiest_labels() -> None:
    total = StreamProfile("all streams", ())
    labels = tuple(LabelProfile(f"request-{number}", 1, 0.0) for number in range(25))
    lines = str(ProfileReport("GPU", "cuda", 0.0, (), total, 0, {}, labels)).splitlines()
    assert lines[-1] == "  and 5 more"
    assert lines[-2].split() == ["request-19", "1", "0.000"]


def test_text() -> None:
    affine = OperationProfile("affine", "launch", 4, 2.0, 0.5, 0.25, 1.0, 0.375, 0.99, 0)
    upload = OperationProfile("upload", "upload", 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5_000_000)
    wait = OperationProfile("wait", "wait", 2, 9.0, 4.5, 1.0, 8.0, 1.0, 8.0, 0)
    left, right = StreamProfile("left", (affine, upload)), StreamProfile("right", (wait,))
    total = StreamProfile("all streams", (wait, affine, upload))
    waits = {"polls": 3, "parks": 0}
    labels = (LabelProfile("request-17", 5, 2.5), LabelProfile("a\nb", 2, 0.5))
    report = ProfileReport("GPU", "cuda", 0.012, (left, right), total, 1, waits, labels)
    assert str(report) == (
        "GPU (cuda driver): 0.012 s, 7 operations on 2 streams, 1 more untimed\n"
        "\n"
        "stream left: 25.0% at work, 4 kernels 2.000 ms, 1 transfer 1.000 ms, 5.000 MB\n"
        "  operation  kind    count  total ms  mean us  min us  p50 us  p99 us  max us  GB/s\n"
        "  affine     launch      4     2.000    500.0   250.0   375.0   990.0  1000.0     -\n"
        "  upload     upload      1     1.000   1000.0  1000.0  1000.0  1000.0  1000.0  5.00\n"
        "\n"
        "stream right: 0.0% at work, 0 kernels 0.000 ms, 0 transfers 0.000 ms, 0.000 MB\n"
        "  operation  kind  count  total ms  mean us  min us  p50 us  p99 us  max us  GB/s\n"
        "  wait       wait      2     9.000   4500.0  1000.0  1000.0  8000.0  8000.0     -\n"
        "\n"
        "all streams: 0.25 at work at once, 4 kernels 2.000 ms, 1 transfer 1.000 ms, 5.000 MB\n"
        "  operation  kind    count  total ms  mean us  min us  p50 us  p99 us  max us  GB/s\n"
        "  wait       wait        2     9.000   4500.0  1000.0  1000.0  8000.0  8000.0     -\n"
        "  affine     launch      4     2.000    500.0   250.0   375.0   990.0  1000.0     -\n"
        "  upload     upload      1     1.000   1000.0  1000.0  1000.0  1000.0  1000.0  5.00\n"
        "\n"
        "2 labels:\n"
        "  label       count  busy ms\n"
        "  request-17      5    2.500\n"
        "  a\\nb            2    0.500"
    )
    found = report.to_dict()
    assert found["streams"][0]["utilisation"] == pytest.approx(0.25)
    assert found["streams"][0]["operations"][1] == {
        **dataclasses.asdict(upload),
        "bandwidth": pytest.approx(5e9),
    }
