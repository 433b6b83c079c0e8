"""CuPy: `cupy.cuda.Stream.launch_host_func`, which its documentation gives for following a stream's progress.

The host function runs on a thread of the CUDA driver and takes the GIL there; ``call_soon_threadsafe`` reaches the loop
from this thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import cupy
import cupyx
import numpy as np

from ..sources import EMPTY, SPIN


class CupyHostFunction:
    def __init__(self) -> None:
        self._empty = cupy.RawKernel(EMPTY, "empty")
        self._spin = cupy.RawKernel(SPIN, "spin")

    def stream(self) -> Any:
        return cupy.cuda.Stream(non_blocking=True)

    def launch(self, stream: Any, seconds: float) -> None:
        with stream:
            if seconds:
                self._spin((1,), (1,), (np.uint64(seconds * 1e9),))
            else:
                self._empty((1,), (1,), ())

    def submit(self, stream: Any, seconds: float) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.launch(stream, seconds)
        stream.launch_host_func(self._done, (loop, future))
        return future

    def service(self, rows: int, width: int, layers: int) -> Callable[[], Awaitable[None]]:
        """Return a function that does one request: copy rows up, multiply them by each layer, copy them down."""
        weight = cupy.full((width, width), 1 / width, cupy.float16)
        stream = self.stream()
        up, down = (cupyx.empty_pinned((rows, width), np.float16) for _ in range(2))
        up[:] = 1

        async def request() -> None:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            with stream:
                x = cupy.empty((rows, width), cupy.float16)
                x.set(up)
                for _ in range(layers):
                    x = x @ weight
                x.get(out=down, blocking=False)
            stream.launch_host_func(self._done, (loop, future))
            await future

        return request

    @staticmethod
    def _done(argument: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        loop, future = argument
        loop.call_soon_threadsafe(future.set_result, None)

    def own_time(self, seconds: float) -> float:
        stream = self.stream()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        times: list[float] = []
        for _ in range(9):
            start.record(stream)
            self.launch(stream, seconds)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
        return median(times)


def start() -> CupyHostFunction:
    return CupyHostFunction()
