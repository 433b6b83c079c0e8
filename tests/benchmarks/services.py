"""Rows about a service: handlers that compute a small model of PyTorch, all in one event loop.

Each request copies its rows from pinned memory to the GPU, runs six linear layers of 1 024 in half precision, and
copies the result to pinned memory. Four ways to await that alternate in one process:

- `aiocuda.integrations.torch.submit`, on a few streams;
- PyTorch on the loop: ``stream.synchronize()``, so that nothing else runs meanwhile;
- `asyncio.to_thread`: each request on a thread, each handler with a stream;
- an event that each handler queries after ``asyncio.sleep(0)``.

Without PyTorch the model is NumPy's, which shows that the row works.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
from collections.abc import Awaitable, Callable
from statistics import median
from time import perf_counter, process_time
from typing import Any, Protocol

import numpy as np

import aiocuda

from .figures import Measured
from .setting import Setting

WIDTH, LAYERS = 1024, 6


class Model(Protocol):
    """A model on one GPU, or on the host."""

    def slot(self) -> Any:
        """Return the memory of one handler."""

    def compute(self, slot: Any) -> None:
        """Enqueue one request on the current stream."""

    def submit(self, stream: aiocuda.Stream, slot: Any) -> Awaitable[None]:
        """Enqueue one request on a stream of aiocuda."""

    def blocking(self, slot: Any) -> None:
        """Do one request on the current stream, and wait for it."""

    def in_thread(self, slot: Any) -> None:
        """Do one request on the slot's own stream, and wait for it."""

    async def polling(self, slot: Any) -> None:
        """Enqueue one request on the slot's own stream, and query its event in each iteration of the loop."""

    def check(self, slot: Any) -> None:
        """Raise unless the slot has the right result."""


class TorchModel:
    """The model in PyTorch, on a GPU."""

    class Slot:
        """The pinned memory of one handler, and a stream."""

        def __init__(self, torch: Any, rows: int, value: float) -> None:
            self.up = torch.full((rows, WIDTH), value, dtype=torch.float16).pin_memory()
            self.down = torch.zeros((rows, WIDTH), dtype=torch.float16).pin_memory()
            self.stream = torch.cuda.Stream()
            self.event = torch.cuda.Event()

    def __init__(self, rows: int) -> None:
        import torch

        from aiocuda.integrations import torch as ours

        self._torch, self._ours, self._rows = torch, ours, rows
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        for layer in layers:
            torch.nn.init.constant_(layer.weight, 1 / WIDTH)
        self._network = torch.nn.Sequential(*layers).half().cuda().eval().requires_grad_(False)
        self._made = 0
        gc.collect()
        gc.freeze()  # as `child` does for what it has imported: services exclude PyTorch's objects from collections

    def slot(self) -> Any:
        self._made += 1
        return self.Slot(self._torch, self._rows, float(self._made % 7 + 1))

    def compute(self, slot: Any) -> None:
        slot.down.copy_(self._network(slot.up.to("cuda", non_blocking=True)), non_blocking=True)

    def submit(self, stream: aiocuda.Stream, slot: Any) -> Awaitable[None]:
        operation: aiocuda.Operation[None] = self._ours.submit(stream, self.compute, slot)
        return operation

    def blocking(self, slot: Any) -> None:
        self.compute(slot)
        self._torch.cuda.current_stream().synchronize()

    def in_thread(self, slot: Any) -> None:
        with self._torch.cuda.stream(slot.stream):
            self.compute(slot)
        slot.stream.synchronize()

    async def polling(self, slot: Any) -> None:
        with self._torch.cuda.stream(slot.stream):
            self.compute(slot)
            slot.event.record()
        while not slot.event.query():
            await asyncio.sleep(0)

    def check(self, slot: Any) -> None:
        expected, seen = float(slot.up[0, 0]), slot.down[:: self._rows // 2]  # of 8 192 rows, some are enough
        if not self._torch.allclose(seen, self._torch.full_like(seen, expected), rtol=0.02):
            raise AssertionError(f"{seen} instead of {expected}")
        seen.zero_()


class NumpyModel:
    """The model in NumPy, on the host."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._weight = np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32)

    def slot(self) -> Any:
        return {"up": np.ones((min(self._rows, 8), WIDTH), np.float32)}

    def compute(self, slot: Any) -> None:
        slot["down"] = slot["up"] @ self._weight

    def submit(self, stream: aiocuda.Stream, slot: Any) -> Awaitable[None]:
        return stream.submit(self.compute, slot)

    def blocking(self, slot: Any) -> None:
        self.compute(slot)

    def in_thread(self, slot: Any) -> None:
        self.compute(slot)

    async def polling(self, slot: Any) -> None:
        self.compute(slot)
        await asyncio.sleep(0)

    def check(self, slot: Any) -> None:
        np.testing.assert_allclose(slot.pop("down"), slot["up"], rtol=1e-3)


async def torch_service(setting: Setting) -> Measured:
    """Requests per second of all handlers. Baseline: PyTorch on the loop."""
    device, rows = setting.device, setting.count("rows")
    has_torch = device.driver.name == "cuda" and importlib.util.find_spec("torch") is not None
    model: Model = TorchModel(rows) if has_torch else NumpyModel(rows)
    streams = [setting.stream() for _ in range(setting.count("streams"))]
    slots = [model.slot() for _ in range(setting.count("handlers"))]

    async def ours(number: int) -> None:
        await model.submit(streams[number % len(streams)], slots[number])

    async def on_loop(number: int) -> None:
        model.blocking(slots[number])

    async def in_thread(number: int) -> None:
        await asyncio.to_thread(model.in_thread, slots[number])

    async def polling(number: int) -> None:
        await model.polling(slots[number])

    ways = {"ours": ours, "on_loop": on_loop, "to_thread": in_thread, "sleep_0": polling}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    longest: dict[str, float] = dict.fromkeys(ways, 0.0)
    cores: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(setting.count("repeats") + 1):
        for name, way in ways.items():
            requests = 2 if repeat == 0 else setting.count("requests")
            setting.turns.reset()
            began, cpu = perf_counter(), process_time()
            await _serve(way, len(slots), requests)
            seconds = perf_counter() - began
            if repeat:  # the first one loads the kernels
                rates[name].append(len(slots) * requests / seconds)
                cores[name].append((process_time() - cpu) / seconds)
                longest[name] = max(longest[name], setting.turns.longest())
            for slot in slots:
                model.check(slot)
    figures = {"longest_turn_ms": longest["ours"] * 1e3, "cores": median(cores["ours"])}
    for name in ("to_thread", "sleep_0"):
        figures[f"times_of_{name}"] = median(rates["ours"]) / median(rates[name])
    for name in ("on_loop", "to_thread", "sleep_0"):
        figures[f"{name}_per_s"] = median(rates[name])
        figures[f"{name}_longest_turn_ms"] = longest[name] * 1e3
        figures[f"{name}_cores"] = median(cores[name])
    notes = [] if has_torch else ["PyTorch on a GPU is missing: the model is NumPy's"]
    return Measured(rates["ours"], rates["on_loop"], figures, notes)


async def _serve(way: Callable[[int], Awaitable[None]], handlers: int, requests: int) -> None:
    async def handler(number: int) -> None:
        for _ in range(requests):
            await way(number)

    await asyncio.gather(*[handler(number) for number in range(handlers)])
