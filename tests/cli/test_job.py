"""The main job on each driver, without the command line around it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import aiocuda
from aiocuda import Device
from aiocuda.cli._demo import DemoJob, search
from aiocuda.cli._files import find_files
from aiocuda.cli._histogram import HEADER_BYTES
from aiocuda.cli._report import PICTURE_BATCHES, STAGES, DemoReport
from tests.helpers import open_peer, quickly, until

if TYPE_CHECKING:
    from aiocuda.cli._screen import ProgressBar
else:
    ProgressBar = object  # it needs rich, which a GPU machine may lack

pytestmark = pytest.mark.asyncio

CONTRACT = [
    *("driver", "device", "version", "files", "bytes", "verified", "seconds", "sequential_seconds", "speedup"),
    *("speedup_bound", "overlap_efficiency", "stage_seconds", "host_bandwidth", "skipped", "most_random"),
    "least_random",
]


class Watcher(ProgressBar):
    """Records the progress, and calls a function at the start of a step."""

    def __init__(self, at: dict[str, Callable[[], object]] | None = None) -> None:
        super().__init__()
        self.phases: dict[str, list[int]] = {}
        self._at = at or {}

    def begin(self, what: str, total: int) -> None:
        self._at.get(what, lambda: None)()
        self.phases[what] = [total, 0]
        self._what = what

    def advance(self, nbytes: int) -> None:
        self.phases[self._what][1] += nbytes


def grow(folder: Path) -> dict[str, bytes]:
    """Some files: small, empty, of several slots."""
    contents = {f"small {number}": os.urandom(number * 37) for number in range(60)}
    contents["large"] = os.urandom(2_500_000)
    contents["text"] = b"all work and no play " * 30_000
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return contents


async def work(device: Device, folder: Path, watcher: Watcher | None = None) -> tuple[DemoReport, list[dict[str, Any]]]:
    files, skipped = await asyncio.to_thread(find_files, str(folder))
    lines: list[str] = []
    report = await DemoJob(device, files, skipped, watcher or Watcher()).run(lines.append)
    return report, [json.loads(line) for line in lines]


async def test_every_file_is_counted_and_checked(device: Device, tmp_path: Path) -> None:
    contents = grow(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    watcher = Watcher()
    report, lines = await work(device, tmp_path, watcher)
    assert report.verified
    assert (report.files, report.bytes) == (len(contents), sum(map(len, contents.values())))
    assert [(Path(each.path).name, each.reason) for each in report.skipped] == [("fifo", "a FIFO")]
    assert {Path(line["path"]).name for line in lines} == set(contents)
    for line in lines:
        content = np.frombuffer(contents[Path(line["path"]).name], np.uint8)
        assert line["histogram"] == np.bincount(content, minlength=256).tolist()
        assert line["bytes"] == content.size
    by_name = {Path(line["path"]).name: line["entropy"] for line in lines}
    assert by_name["large"] == pytest.approx(8, abs=1e-3)
    assert by_name["small 0"] == 0
    assert Path(report.most_random[0].path).name == "large"
    assert [each.entropy for each in report.most_random] == sorted(
        (e.entropy for e in report.most_random), reverse=True
    )
    assert [each.entropy for each in report.least_random] == sorted(each.entropy for each in report.least_random)
    assert watcher.phases["checking"] == [report.bytes] * 2
    assert watcher.phases["timing"] == [report.bytes * 6] * 2


async def test_the_report_has_times(device: Device, tmp_path: Path) -> None:
    grow(tmp_path)
    report, _ = await work(device, tmp_path)
    told = json.loads(report.as_json())
    assert list(told) == CONTRACT
    assert report.as_json().isascii()
    assert told["driver"] == device.driver.name
    assert (told["host_bandwidth"] is None) == (device.driver.name == "cuda")
    assert list(told["stage_seconds"]) == ["read", "upload", "compute", "download"]
    stages = told["stage_seconds"].values()
    assert min(stages) > 0
    assert told["speedup"] == pytest.approx(told["sequential_seconds"] / told["seconds"])
    assert told["speedup_bound"] == pytest.approx(sum(stages) / max(stages))
    assert sum(stages) <= told["sequential_seconds"]
    assert 0 < told["overlap_efficiency"] <= 1


async def test_nothing_to_read(device: Device, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    report, lines = await work(device, tmp_path)
    assert (report.files, report.bytes, report.verified, len(lines)) == (1, 0, True, 1)
    told = json.loads(report.as_json())
    assert (told["speedup"], told["seconds"], told["most_random"]) == (None, 0.0, [])
    assert told["stage_seconds"] == {"read": 0.0, "upload": 0.0, "compute": 0.0, "download": 0.0}
    (tmp_path / "empty").unlink()
    report, lines = await work(device, tmp_path)
    assert (report.files, report.verified, lines) == (0, True, [])


async def test_a_file_that_vanishes_or_changes_before_it_is_checked(device: Device, tmp_path: Path) -> None:
    contents = grow(tmp_path)

    def meddle() -> None:
        (tmp_path / "small 7").unlink()
        (tmp_path / "small 9").write_bytes(b"")
        (tmp_path / "text").write_bytes(contents["text"].upper())

    report, lines = await work(device, tmp_path, Watcher({"checking": meddle}))
    assert report.verified
    assert {Path(each.path).name: each.reason for each in report.skipped} == {
        "small 7": "vanished",
        "small 9": "shrank while it was read",
    }
    assert {Path(line["path"]).name for line in lines} == set(contents) - {"small 7", "small 9"}
    assert report.changed == 0


async def test_a_file_that_changes_between_the_runs_is_no_mismatch(device: Device, tmp_path: Path) -> None:
    contents = grow(tmp_path)

    def meddle() -> None:
        (tmp_path / "small 7").unlink()
        (tmp_path / "text").write_bytes(contents["text"].upper())

    report, _ = await work(device, tmp_path, Watcher({"timing": meddle}))
    assert report.verified
    assert report.changed == 12  # two files, six runs
    assert report.files == len(contents)


async def test_a_wrong_byte_on_the_way_is_found(tmp_path: Path) -> None:
    """The device is given another byte than the file has: one run in seven is enough."""
    grow(tmp_path)
    for uploads in (1, 21):
        async with open_peer() as (peer, device):
            left = [uploads]

            def corrupt(stream: int, target: int, source: int, nbytes: int, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    byte = ctypes.c_ubyte.from_address(source + HEADER_BYTES)
                    byte.value ^= 1

            peer.before["upload"] = corrupt
            report, _ = await work(device, tmp_path)
            assert not report.verified
            assert [Path(path).name for path in report.mismatched] == ["large"]


async def test_the_picture(device: Device, tmp_path: Path) -> None:
    """Both runs, one above the other: each stage has one span for each of the same batches."""
    grow(tmp_path)
    report, _ = await work(device, tmp_path)
    tree = ET.fromstring(report.overlap.to_svg("t"))
    spans = [rect.attrib for rect in tree.iter("{http://www.w3.org/2000/svg}rect")]
    batches = min(report.batches, PICTURE_BATCHES)
    assert batches == PICTURE_BATCHES
    for stage, kind in zip(STAGES, ("read", "upload", "launch", "download"), strict=True):
        own = [span for span in spans if span["data-stream"] == stage]
        assert [span["data-kind"] for span in own] == [kind] * batches * 2
        times = [(float(span["data-start-us"]), float(span["data-end-us"])) for span in own]
        assert times == sorted(times)
        assert all(start <= end for start, end in times)
        halves = {float(span["y"]) for span in own[:batches]}, {float(span["y"]) for span in own[batches:]}
        assert [len(half) for half in halves] == [1, 1]
        assert max(halves[0]) < min(halves[1])


async def test_without_overlap_no_stage_works_beside_another(device: Device, tmp_path: Path) -> None:
    grow(tmp_path)
    report, _ = await work(device, tmp_path)
    spans = sorted(report.overlap.serial, key=lambda span: span.start_us)
    read, upload, compute, download = ([span for span in spans if span.stream == stage] for stage in STAGES)
    for one, two, three in zip(upload, compute, download, strict=True):
        assert one.end_us <= two.start_us
        assert two.end_us <= three.start_us
    # A read is timed by the host's clock, which begins sooner than that of the device, by the same time for all.
    most = min(after.start_us - before.end_us for before, after in zip(download, read[1:], strict=False))
    assert max(before.end_us - after.start_us for before, after in zip(read, upload, strict=True)) <= most


async def test_a_cancelled_search_stops_its_thread(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does it, while a large tree is walked."""
    begun = threading.Event()

    def endless(*_: object) -> Iterator[tuple[str, bool]]:
        begun.set()
        while True:
            yield str(tmp_path), False

    monkeypatch.setattr("aiocuda.cli._files._walk", endless)
    searching = asyncio.ensure_future(search(device, str(tmp_path), frozenset()))
    await until(begun.is_set)
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching
    await quickly(device.aclose())


async def test_the_loop_makes_no_call_that_may_block(no_blocking_calls: None, tmp_path: Path) -> None:
    grow(tmp_path)
    async with aiocuda.open_device(driver="host") as device:
        report, _ = await work(device, tmp_path)
    assert report.verified
