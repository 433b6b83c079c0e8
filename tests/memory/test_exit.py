"""The interpreter's exit, with memory of all kinds still held."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
import numpy as np
import aiocuda
from aiocuda.memory import ScrubbingResource, SizeClassResource
from aiocuda.testing import Latch

kept = []

async def main():
    device = await aiocuda.open_device(driver="host")
    device.memory.use(lambda upstream: SizeClassResource(ScrubbingResource(upstream)))
    stream, other = device.stream(), device.stream()
    latch = Latch(device, seconds=0.3)
    latch.hold(stream)
    await latch.held()
    buffers = [each.empty(1000) for each in (stream, other) for _ in range(3)]
    for buffer in buffers:
        stream.fill(buffer, 1)
    buffers.pop().free(other)
    buffers.pop().free()
    pinned = device.pinned(1000)
    kept.extend([device, latch, stream, other, pinned, *buffers[:2]])  # the others are dropped
    kept.append(stream.download(buffers[0], out=np.zeros(1000, np.float32)))

asyncio.run(main())
print("left")
"""


@pytest.mark.slow
def test_exit_beside_held_work_is_clean() -> None:
    """P10: the exit waits for the device, frees nothing, and warns of nothing but that the device was not closed."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "left\n", "")
