"""A launch pays for labels and listeners only if there are any."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import aiocuda

from .host_time import IdleDriver
from .listening import Hooks
from .steps import Steps

pytestmark = pytest.mark.asyncio


@pytest.mark.python_core
async def test_a_launch_makes_no_call_for_labels_and_listeners() -> None:
    kernel: Any = aiocuda.Kernel("k", source='extern "C" __global__ void k(float *x) {}', host=lambda x: None)
    async with aiocuda.open_device(driver=IdleDriver()) as device, device.stream() as stream:
        buffer = stream.empty(64)

        async def count(launch: Callable[[], Any], listeners: int = 0) -> int:
            with ExitStack() as stack:
                for _ in range(listeners):
                    stack.enter_context(device.listen(Hooks()))
                for _ in range(3):  # load the kernel, bind the launch, make the events
                    await [launch() for _ in range(10)][-1]
                with Steps() as steps:
                    for _ in range(10):
                        last = launch()
            await last
            return steps.total // 10

        plain = await count(lambda: stream.launch(kernel, 1, 1, buffer))
        with aiocuda.label("request-17"):
            in_block = await count(lambda: stream.launch(kernel, 1, 1, buffer))
        labelled = await count(lambda: stream.launch(kernel, 1, 1, buffer, label="request-17"))
        one = await count(lambda: stream.launch(kernel, 1, 1, buffer), listeners=1)
        three = await count(lambda: stream.launch(kernel, 1, 1, buffer), listeners=3)
    assert (plain, in_block, labelled) == (4, 4, 4)
    # The ring asks `rare`, which makes two calls. The hooks themselves are not the package's.
    assert (one, three) == (plain + 3, plain + 3)
