"""Tests: a coroutine that uses a GPU, tested without one.

`standardise` is what an application would have; the rest is its tests. The same tests run on both drivers: those on a
GPU have the mark `aiocuda_gpu`, and aiocuda's pytest plugin skips them where there is none. `Latch` holds a stream, so
that a test decides what has happened and what has not, and never sleeps.

Run as a program, this file runs its own tests. With ``--driver cuda`` it runs those on the GPU, and a missing GPU is an
error. Otherwise pytest finds them as it finds all others: ``pytest examples/05_pytest.py``. It needs pytest and
pytest-asyncio: ``pip install pytest-asyncio``.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda.testing import Latch

SOURCE = """
extern "C" __global__ void shift_and_scale(float* x, float shift, float scale, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = (x[i] + shift) * scale;
}
"""


def shift_and_scale_on_host(x, shift, scale, n):
    x += shift
    x *= scale


shift_and_scale = aiocuda.Kernel("shift_and_scale", source=SOURCE, host=shift_and_scale_on_host)


async def standardise(stream, x):
    """``x`` with mean 0 and standard deviation 1."""
    if not x.std() > 0:
        raise ValueError("all values are the same")
    buffer = stream.empty_like(x)
    stream.copy(buffer, x)
    stream.launch(shift_and_scale, (x.size + 255) // 256, 256, buffer, -x.mean(), 1 / x.std(), x.size)
    return await stream.download(buffer)


@pytest_asyncio.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.aiocuda_gpu)])
async def device(request):
    async with aiocuda.open_device(driver=request.param) as device:
        yield device


@pytest.mark.asyncio
async def test_mean_and_deviation(device):
    async with device.stream() as stream:
        result = await standardise(stream, np.arange(1000, dtype=np.float32))
    assert result.mean() == pytest.approx(0, abs=1e-5)
    assert result.std() == pytest.approx(1, abs=1e-5)


@pytest.mark.asyncio
async def test_bad_input_is_refused_without_a_driver_call(device):
    async with device.stream() as stream:
        with pytest.raises(ValueError, match="all values are the same"):
            await standardise(stream, np.ones(10, np.float32))
        assert stream.statistics().operations == 0


@pytest.mark.asyncio
async def test_cancelled_while_the_device_is_busy(device):
    """Cancelling does not damage the stream: the next caller gets a result."""
    x = np.arange(1000, dtype=np.float32)
    async with device.stream() as stream:
        with Latch(device) as latch:
            latch.hold(stream)
            task = asyncio.create_task(standardise(stream, x))
            await latch.held()  # the device is busy, so no later operation can be done
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert np.isfinite(await standardise(stream, x)).all()


def main(driver):
    selected = {
        "auto": [],
        "host": ["-m", "not aiocuda_gpu"],
        "cuda": ["-m", "aiocuda_gpu", "--aiocuda-require-gpu"],
    }[driver]
    plugin = ["-p", "aiocuda.testing.plugin"]  # for a source tree; an installed aiocuda has registered it
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    return subprocess.call([*command, *plugin, *selected])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="runs this file's tests")
    parser.add_argument("--driver", choices=("auto", "host", "cuda"), default="auto")
    sys.exit(main(parser.parse_args().driver))
