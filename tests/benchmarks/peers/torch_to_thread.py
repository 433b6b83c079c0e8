"""PyTorch: `torch.cuda.Event`, awaited in a thread.

PyTorch has no awaitable event. ``Event.synchronize`` releases the GIL and blocks its thread. For such a call, asyncio's
documentation recommends ``asyncio.to_thread``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cache
from statistics import median
from typing import Any

import torch


class TorchToThread:
    def __init__(self) -> None:
        self._one = torch.zeros(1, device="cuda")

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def launch(self, stream: Any, seconds: float) -> None:
        cycles = self._cycles(seconds) if seconds else 0
        with torch.cuda.stream(stream):
            if seconds:
                torch.cuda._sleep(cycles)  # PyTorch's own tests use it; it has no public kernel that takes a given time
            else:
                self._one.add_(1)

    def submit(self, stream: Any, seconds: float) -> Coroutine[Any, Any, None]:
        self.launch(stream, seconds)
        return self._synchronized(stream)

    @staticmethod
    def _synchronized(stream: Any) -> Coroutine[Any, Any, None]:
        event = torch.cuda.Event()
        event.record(stream)
        return asyncio.to_thread(event.synchronize)

    @cache  # noqa: B019 - one peer per process
    def _cycles(self, seconds: float) -> int:
        return round(seconds / self._sleep_time(10_000_000) * 10_000_000)

    def _sleep_time(self, cycles: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times: list[float] = []
        for _ in range(9):
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return median(times)

    def own_time(self, seconds: float) -> float:
        return self._sleep_time(self._cycles(seconds))

    def copies(self, direction: str, nbytes: int) -> Any:
        """A function that starts one copy of pageable memory and returns what to await."""
        stream = self.stream()
        host = torch.ones(nbytes, dtype=torch.uint8)
        device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        source, target = (host, device) if direction == "up" else (device, host)

        def copy() -> Coroutine[Any, Any, None]:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            return self._synchronized(stream)

        return copy


def start() -> TorchToThread:
    return TorchToThread()
