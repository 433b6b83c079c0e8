"""R4: operations as ranges of NVTX. A small tool, compiled here, records what NVTX gives to a profiler."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import aiocuda
from aiocuda import Device, InvalidTypeError, Stream

pytest.importorskip("nvtx")
observe: Any = importlib.import_module("aiocuda.observe")

COMPILER = shutil.which("cc") or shutil.which("gcc")
HERE = Path(__file__).parent

#: What the programs below share.
BEGIN = """
import asyncio, contextlib, gc
import numpy as np
import aiocuda
from aiocuda import DeviceFault
from aiocuda.driver.host import HostDriver
from aiocuda.observe import NvtxInstrument
from tests.helpers import Latch
from tests.helpers import AFFINE, TRAP
"""


@dataclasses.dataclass(frozen=True)
class Received:
    """What the tool has received."""

    domains: list[str]
    categories: dict[int, str]
    ranges: list[tuple[str, str]]  #: text and category, in the order of their beginnings
    open: list[str]  #: texts of those that have not ended
    nested: int  #: the most that were open together


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    """A device of the host driver: GPU tests need no packages beside those that aiocuda requires."""
    async with aiocuda.open_device(driver="host") as opened:
        yield opened


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("nvtx") / "libtool.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, HERE / "nvtx_tool.c"], check=True)
    return library


def received(tool: Path, tmp_path: Path, program: str) -> Received:
    """Run a program below the tool."""
    output = tmp_path / "output"
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tool), "NVTX_TEST_OUTPUT": str(output)}
    program = BEGIN + textwrap.dedent(program)
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    domains, categories = [], {}
    ranges: list[tuple[str, str]] = []
    still_open: dict[str, str] = {}
    nested = 0
    for line in output.read_text("ascii").splitlines():
        what, *rest = line.split(" ")
        if what == "end":
            del still_open[rest[0]]  # each range ends once
            continue
        text = bytes.fromhex(rest[-1]).decode()
        if what == "domain":
            domains.append(text)
        elif what == "category":
            categories[int(rest[0])] = text
        else:
            still_open[rest[0]] = text
            nested = max(nested, len(still_open))
            ranges.append((text, categories[int(rest[1])]))
    return Received(domains, categories, ranges, list(still_open.values()), nested)


@pytest.mark.slow
def test_a_tool_receives_a_range_for_each_operation(tool: Path, tmp_path: Path) -> None:
    found = received(
        tool,
        tmp_path,
        """
        async def main():
            async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
                await stream.synchronize()
                with NvtxInstrument(device), Latch(device) as latch:
                    buffer = await stream.upload(np.zeros(1024, np.uint32))
                    latch.hold(stream)
                    with aiocuda.label("request-17"):
                        launches = [stream.launch(AFFINE, 4, 256, buffer, 1024, 3, 1) for _ in range(3)]
                    await latch.held()
                    latch.release()
                    await launches[-1]
                    await stream.upload(np.zeros(5 << 20, np.uint32))
                await stream.synchronize()
        asyncio.run(main())
        """,
    )
    assert "aiocuda" in found.domains
    ranges = [each for each in found.ranges if each[1] in ("upload", "launch") and each[0] != "hold"]  # of the latch
    assert ranges == [
        ("upload", "upload"),
        *[("affine [request-17]", "launch")] * 3,
        ("upload", "upload"),
    ]
    assert "synchronize" not in dict(found.ranges)
    assert found.nested >= 3
    assert found.open == []


@pytest.mark.slow
def test_every_range_ends(tool: Path, tmp_path: Path) -> None:
    """Those of operations in flight at the end of the block, of abandoned ones, and after a fault."""
    found = received(
        tool,
        tmp_path,
        """
        async def main():
            async with aiocuda.open_device(driver=HostDriver()) as device:
                stream, other = device.stream(), device.stream()
                instrument = NvtxInstrument(device)
                with Latch(device) as latch:
                    with instrument:
                        latch.hold(stream)
                        latch.hold(other)
                        abandoned = stream.upload(np.zeros(5 << 20, np.uint32), label="abandoned")
                        last = other.synchronize(label="last")
                        await latch.held()
                        abandoned.abandon()
                    assert "0 ranges" in repr(instrument)
                    latch.release()
                    await last
                with instrument:
                    stream.synchronize(label="before")
                    with contextlib.suppress(DeviceFault):
                        await stream.launch(TRAP, 1, 1, label="fault")
                    with contextlib.suppress(DeviceFault):
                        stream.synchronize(label="after")
                    assert "0 ranges" in repr(instrument)
        asyncio.run(main())
        """,
    )
    texts = [text for text, _ in found.ranges]
    assert {"synchronize [last]", "upload [abandoned]", "trap [fault]"} <= set(texts)
    assert found.open == []


@pytest.mark.slow
def test_texts_have_any_characters_and_a_limit(tool: Path, tmp_path: Path) -> None:
    found = received(
        tool,
        tmp_path,
        """
        from aiocuda.observe import _nvtx
        async def main():
            async with aiocuda.open_device(driver="host") as device, device.stream() as stream:
                with NvtxInstrument(device):
                    for text in ('"quoted" <script>', "line\\nline\\0", "\\udc80 alone", "x" * 100_000, "ü"):
                        await stream.synchronize(label=text)
                    _nvtx.MOST_TEXTS = 7
                    for number in range(100):
                        await stream.synchronize(label=f"request-{number}")
        asyncio.run(main())
        """,
    )
    texts = [text for text, kind in found.ranges if kind == "synchronize"]
    assert texts[:5] == [
        'synchronize ["quoted" <script>]',
        "synchronize [line\\nline\\x00]",
        "synchronize [\\udc80 alone]",
        f"synchronize [{'x' * 60}…]",
        "synchronize [ü]",
    ]
    assert len(texts) == 105
    assert texts.count("synchronize") >= 97
    assert found.open == []


@pytest.mark.asyncio
async def test_without_a_tool_it_does_not_listen(device: Device, stream: Stream) -> None:
    listening: list[Any] = []
    instrument = observe.NvtxInstrument(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "listen", lambda listener: listening.append(listener))
        with instrument:
            await stream.synchronize()
    assert listening == []
    assert repr(instrument) == f"<NvtxInstrument of {device.name}: 0 ranges>"


@pytest.mark.asyncio
async def test_wrong_arguments(device: Device) -> None:
    for wrong in (7, None, "cuda:0", Device):
        with pytest.raises(InvalidTypeError, match=r"an NvtxInstrument takes an aiocuda\.Device, not"):
            observe.NvtxInstrument(wrong)
