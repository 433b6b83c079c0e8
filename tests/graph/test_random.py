"""Random graphs over three streams, updated between launches, against one after the other."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    Device,
    Stream,
)
from aiocuda.driver.host import HostDriver
from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.testing import SimulatedLoop
from tests.graph.kit import N, affine
from tests.helpers import quickly


def programs(seed: int) -> Any:
    """A recording over three streams, drawn; each step with what it does to the buffers, one after the other."""

    streams: list[Stream] = []  # as long as the device

    async def main(device: Device) -> None:
        chance = random.Random(seed)
        streams.extend(device.stream(name=f"s{index}") for index in range(3))
        first = streams[0]
        buffers = [first.empty(N, np.uint32) for _ in range(3)]
        expected = [0, 0, 0]
        for buffer in buffers:
            await first.fill(buffer, 0)
        steps: list[tuple[Any, str, int, int]] = []
        last: list[list[Any]] = [[] for _ in buffers]  # what touched each of them: (stream, operation)
        with first.capture() as graph:
            for stream in streams[1:]:
                stream.wait(first)
            for _ in range(20):
                stream, verb = chance.choice(streams), chance.choice(("affine", "copy", "fill"))
                to, origin = chance.sample(range(3), 2)
                for touched in (last[to], last[origin]):
                    for where, operation in touched:
                        if where is not stream:
                            stream.wait(operation)
                if verb == "affine":
                    operation = affine(stream, buffers[to], 3, 1)
                elif verb == "copy":
                    operation = stream.copy(buffers[to], buffers[origin])
                else:
                    operation = stream.fill(buffers[to], 0x01020304)
                last[to].append((stream, operation))
                last[origin].append((stream, operation))
                steps.append((operation, verb, to, origin))
            for stream in streams[1:]:
                first.wait(stream)
        for _ in range(6):
            values = []
            for operation, verb, to, origin in steps:
                value = chance.randrange(1 << 24, 1 << 30)
                if chance.random() < 0.5:
                    if verb == "affine":
                        graph.update(operation, buffers[to], N, 2 * value + 1, value)
                    elif verb == "copy":
                        graph.update(operation, buffers[to][: N // 2], buffers[origin][: N // 2])
                        graph.update(operation, buffers[to], buffers[origin])
                    else:
                        graph.update(operation, buffers[to], value)
                values.append(graph._nodes[operation.index].driver_node)
            graph.launch(chance.choice(streams))
            for (_, verb, to, origin), node in zip(steps, values, strict=True):
                if verb == "affine":
                    _, _, factor, term = node.values
                    expected[to] = (expected[to] * factor + term) % 2**32
                else:
                    expected[to] = (
                        expected[origin] if verb == "copy" else int.from_bytes((node.pattern * 4)[:4], "little")
                    )
        await device.drain()
        results = [await first.download(buffer) for buffer in buffers]
        assert [set(result.tolist()) for result in results] == [{value} for value in expected], f"seed {seed}"

    return main


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(6))
async def test_random_graphs_give_what_one_after_the_other_gives(seed: int) -> None:
    async with aiocuda.open_device(driver=HostDriver(latency=0.0)) as device:
        program = programs(seed)
        await quickly(program(device))


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_on_the_simulated_driver(seed: int) -> None:
    driver, program = SimulatedDriver(seed), programs(seed)

    async def main() -> None:
        async with aiocuda.open_device(driver=driver) as device:
            await program(device)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())
    assert driver.violations == []
    assert driver.statistics()["graphs"] == 0
    driver.close()
