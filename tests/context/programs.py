"""What the tests of the managed context share: a program that uses all of its parts, and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aiocuda import DeviceBuffer, Kernel, ManagedContext, Operation, Slot, Stage, StepConfig
from tests.helpers import AFFINE

DRIVERS = ["host", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]

SIZE = 256

#: Sums in single precision, so that another order of the same work would show.
BLEND = Kernel(
    "blend",
    source="""
    extern "C" __global__ void blend(float* state, const float* noise, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) state[i] = state[i] * 0.7f + noise[i];
    }
    """,
    host=lambda state, noise, n: np.add(state[:n] * np.float32(0.7), noise[:n], out=state[:n]),
)


def affine(state: DeviceBuffer, factor: int = 2, summand: int = 1) -> Any:
    """A step's work: x → factor · x + summand, and a copy into the slot's ``out``."""

    def compute(slot: Slot) -> Operation[None]:
        slot.stream.launch(AFFINE, 1, SIZE, state, SIZE, factor, summand)
        return slot.stream.copy(slot.buffer("out", SIZE, np.uint32), state)

    return compute


async def zeros(context: ManagedContext) -> DeviceBuffer:
    """State that lasts from step to step."""
    return await context.stream("control").upload(np.zeros(SIZE, np.uint32))


def numbered(number: int, compute: Any = (), download: Any = ("x",)) -> StepConfig:
    """A step that uploads its number."""
    return StepConfig({"x": np.full(SIZE, number, np.uint32)}, compute, download)


def value(array: npt.NDArray[Any]) -> int:
    """The one number that it consists of."""
    (only,) = np.unique(array)
    return int(only)


async def everything(context: ManagedContext) -> list[bytes]:
    """Uses all parts of a context, and more of each than one stream; what it has computed, bit by bit."""
    random = np.random.default_rng(7)
    found: list[Any] = []
    # streams by purpose
    up, down = context.stream("upload"), context.stream("download")
    big = random.random(100_000, np.float32)  # in chunks, staged by threads
    copy = up.empty_like(big)
    up.copy(copy, big)
    down.wait(up)
    found.append(await down.download(copy))
    # the pool
    async with context.pool.stream(exclusive=True) as left, context.pool.stream(exclusive=True) as right:
        x = left.upload(big[:SIZE].copy())
        right.wait(x)
        found.append(await right.download((await x)[10:]))
    # the coordinator: a fan of uploads, a chain of kernels
    coordinator = context.coordinator
    state = coordinator.upload(np.zeros(SIZE, np.float32))
    for _ in range(5):
        noise = coordinator.upload(random.random(SIZE, np.float32))
        coordinator.compute(BLEND, 1, SIZE, state, noise, SIZE)
    found.append(await coordinator.download(state))

    # a pipeline
    def blend(slot: Slot) -> Operation[None]:
        return slot.stream.launch(BLEND, 1, SIZE, slot.buffer("x", SIZE), slot.buffer("x", SIZE), SIZE)

    pipeline = context.pipeline(
        [
            Stage("upload", lambda slot: slot.stream.copy(slot.buffer("x", SIZE), slot.item)),
            Stage("compute", blend),
            Stage("download", lambda slot: slot.stream.download(slot.buffer("x", SIZE))),
        ]
    )
    found += [result async for result in pipeline.run([random.random(SIZE, np.float32) for _ in range(7)])]
    # steps
    lasting = await context.stream("compute").upload(np.ones(SIZE, np.float32))

    def compute(slot: Slot) -> Operation[None]:
        slot.stream.launch(BLEND, 1, SIZE, lasting, slot.buffer("noise"), SIZE)
        return slot.stream.copy(slot.buffer("out", SIZE), lasting)

    for _ in range(7):
        config = StepConfig({"noise": random.random(SIZE, np.float32)}, compute, ["out"])
        telemetry = await context.triple_buffered_step(config)
        found += [] if telemetry is None else [telemetry.outputs["out"]]
    found += [telemetry.outputs["out"] for telemetry in await context.flush()]
    return [array.tobytes() for array in found]
