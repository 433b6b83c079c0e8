"""A child is forked while work is in flight: its calls are refused and it exits; the parent continues (P12)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.project.tree import ROOT, SOURCE

PROGRAM = """
    import asyncio, json, os, sys
    import numpy as np
    import aiocuda
    from aiocuda.testing import Latch

    def refused(device, stream, buffer):
        told = []
        for verb in (
            lambda: stream.fill(buffer, 1),
            lambda: stream.upload(np.zeros(4, np.float32)),
            lambda: stream.empty(4),
            lambda: stream.synchronize(),
            lambda: buffer.free(),
            lambda: device.stream(),
            lambda: device.pinned(4),
        ):
            try:
                verb()
            except Exception as error:
                told.append(type(error).__name__)
            else:
                told.append("no error")
        return told

    async def main(driver):
        device = await aiocuda.open_device(driver=driver)
        device.drain_timeout = 600  # a child that waited for it would hang
        stream = device.stream()
        buffer = await stream.upload(np.zeros(4, np.float32))
        latch = Latch(device, seconds=120)
        latch.hold(stream)
        await latch.held()
        operations = [stream.fill(buffer, value) for value in range(1000)]
        waiting = [asyncio.create_task(operation.wait()) for operation in operations]
        await asyncio.sleep(0)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, json.dumps(refused(device, stream, buffer)).encode())
            sys.exit(5)  # as a program leaves: what it has inherited is not waited for
        _, status = os.waitpid(child, 0)
        done = sum(operation.done() for operation in operations)
        latch.release()
        await asyncio.gather(*waiting)
        last = (await stream.download(buffer)).tolist()
        await device.aclose()
        print(json.dumps({
            "child": os.waitstatus_to_exitcode(status), "told": json.loads(os.read(reader, 4096)),
            "done": done, "last": last, "in_flight": device.statistics().in_flight,
        }))

    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
@pytest.mark.parametrize("driver", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_child_forked_beside_a_thousand_pending_operations(driver: Any) -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(PROGRAM), driver],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    assert told["told"] == ["ForkedProcessError"] * 7
    assert told["child"] == 5
    assert (told["done"], told["in_flight"], told["last"]) == (0, 0, [999.0] * 4)
