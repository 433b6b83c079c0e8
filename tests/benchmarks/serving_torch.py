"""A row about batches: many requests, each with one row for a small model of PyTorch, in one process without sockets.

The model has four linear layers of 1 024 in half precision. Three ways to serve alternate in one process:

- `aiocuda.serving.MicroBatcher` and `aiocuda.integrations.torch.submit`, padded to buckets, two batches at a time;
- `asyncio.to_thread`: each request on a thread, which has a stream and pinned memory of its own;
- `batched`, if it is installed: its batches run on threads, which have the same.

The rate is that of closed loops: each handler sends its next request when it has the result. The latency is that of an
open loop of Poisson arrivals at 30 and 60 % of each way's own rate, counted from the scheduled time. Without PyTorch
the model is NumPy's, which shows that the row works.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import threading
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

import aiocuda
from aiocuda.serving import Batch, MicroBatcher
from tests.load.outcomes import Outcome, summarise
from tests.load.schedule import Phase, poisson

from .figures import Measured
from .setting import Setting

WIDTH, LAYERS = 1024, 4
MOST_IN_BATCH, BUCKETS, WAIT_S = 32, (1, 8, 16, 32), 1e-3
LOADS = (0.3, 0.6)

#: Of an open loop.
LEAST_ARRIVALS = 5

Way = Callable[[int], Awaitable[Any]]


class Model(Protocol):
    """A model on one GPU, or on the host."""

    def item(self, number: int) -> Any:
        """Return the input of a request."""

    def place(self) -> Any:
        """Return the memory of a batch, and a stream for a thread."""

    def submit(self, stream: aiocuda.Stream, place: Any, items: Sequence[Any], padded: int) -> Awaitable[Any]:
        """Enqueue a batch on a stream of aiocuda."""

    def results(self, place: Any, count: int) -> list[Any]:
        """Return copies of the results of a batch that has ended."""

    def in_thread(self, place: Any, items: Sequence[Any]) -> list[Any]:
        """Compute a batch on the place's own stream, wait for it, and return its results."""

    def is_right(self, number: int, result: Any) -> bool:
        """Return True if this is the result of the request with that number."""


class TorchModel:
    """The model in PyTorch, on a GPU."""

    class Place:
        """Pinned memory of a batch, and a stream."""

        def __init__(self, torch: Any) -> None:
            self.up = torch.zeros((MOST_IN_BATCH, WIDTH), dtype=torch.float16).pin_memory()
            self.down = torch.zeros((MOST_IN_BATCH, WIDTH), dtype=torch.float16).pin_memory()
            self.stream = torch.cuda.Stream()

    def __init__(self) -> None:
        import torch

        from aiocuda.integrations import torch as ours

        self._torch, self._ours = torch, ours
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        for layer in layers:
            torch.nn.init.constant_(layer.weight, 1 / WIDTH)
        self._network = torch.nn.Sequential(*layers).half().cuda().eval().requires_grad_(False)
        for size in BUCKETS:  # cuBLAS chooses and loads its kernels
            self._network(torch.zeros((size, WIDTH), dtype=torch.float16, device="cuda"))
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()

    def item(self, number: int) -> Any:
        return self._torch.full((WIDTH,), float(number % 7 + 1), dtype=self._torch.float16)

    def place(self) -> Any:
        return self.Place(self._torch)

    def _fill(self, place: Any, items: Sequence[Any]) -> None:
        self._torch.stack(list(items), out=place.up[: len(items)])

    def _compute(self, place: Any, count: int) -> None:
        """Enqueue a batch on the current stream."""
        x = place.up[:count].to("cuda", non_blocking=True)
        place.down[:count].copy_(self._network(x), non_blocking=True)

    def submit(self, stream: aiocuda.Stream, place: Any, items: Sequence[Any], padded: int) -> Awaitable[Any]:
        self._fill(place, items)
        operation: aiocuda.Operation[None] = self._ours.submit(stream, self._compute, place, padded)
        return operation

    def results(self, place: Any, count: int) -> list[Any]:
        return list(place.down[:count].clone())

    def in_thread(self, place: Any, items: Sequence[Any]) -> list[Any]:
        self._fill(place, items)
        with self._torch.cuda.stream(place.stream):
            self._compute(place, len(items))
        place.stream.synchronize()
        return self.results(place, len(items))

    def is_right(self, number: int, result: Any) -> bool:
        return abs(float(result[number % WIDTH]) - float(number % 7 + 1)) < 0.1


class NumpyModel:
    """The model in NumPy, on the host. One layer of 16 is enough to show that the row works."""

    width = 16

    def __init__(self) -> None:
        self._weight = np.full((self.width, self.width), 1 / self.width, np.float32)

    def item(self, number: int) -> Any:
        return np.full(self.width, float(number % 7 + 1), np.float32)

    def place(self) -> Any:
        return {"up": np.zeros((MOST_IN_BATCH, self.width), np.float32), "down": np.zeros(0, np.float32)}

    def _fill(self, place: Any, items: Sequence[Any]) -> None:
        np.stack(items, out=place["up"][: len(items)])

    def _compute(self, place: Any, count: int) -> None:
        place["down"] = place["up"][:count] @ self._weight

    def submit(self, stream: aiocuda.Stream, place: Any, items: Sequence[Any], padded: int) -> Awaitable[Any]:
        self._fill(place, items)
        return stream.submit(self._compute, place, padded)

    def results(self, place: Any, count: int) -> list[Any]:
        return list(place["down"][:count].copy())

    def in_thread(self, place: Any, items: Sequence[Any]) -> list[Any]:
        self._fill(place, items)
        self._compute(place, len(items))
        return self.results(place, len(items))

    def is_right(self, number: int, result: Any) -> bool:
        return abs(float(result[number % self.width]) - float(number % 7 + 1)) < 0.1


class Threads:
    """Computes batches on threads. Each thread has a place of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._local = threading.local()

    def compute(self, items: Sequence[Any]) -> list[Any]:
        """Return the results of a batch. **Blocks.**"""
        place = getattr(self._local, "place", None)
        if place is None:
            place = self._local.place = self._model.place()
        return self._model.in_thread(place, items)


async def torch_serving(setting: Setting) -> Measured:
    """Requests per second of all handlers. Baseline: `asyncio.to_thread` for each request."""
    has_torch = setting.device.driver.name == "cuda" and importlib.util.find_spec("torch") is not None
    model: Model = TorchModel() if has_torch else NumpyModel()
    threads = Threads(model)
    items = [model.item(number) for number in range(7)]
    places = [model.place() for _ in range(2)]
    notes = [] if has_torch else ["PyTorch on a GPU is missing: the model is NumPy's"]

    async def infer(batch: Batch[Any]) -> list[Any]:
        place = places[batch.slot.number]
        await model.submit(batch.stream, place, batch.items, batch.padded)
        return model.results(place, batch.size)

    async with MicroBatcher(
        infer,
        max_batch_size=MOST_IN_BATCH,
        batch_wait_timeout_s=WAIT_S,
        max_concurrent_batches=len(places),
        max_queued_requests=100_000,
        buckets=BUCKETS,
        device=setting.device,
    ) as batcher:

        async def ours(number: int) -> Any:
            return await batcher.submit(items[number % 7])

        async def to_thread(number: int) -> Any:
            return (await asyncio.to_thread(threads.compute, [items[number % 7]]))[0]

        ways: dict[str, Way] = {"ours": ours, "to_thread": to_thread}
        if importlib.util.find_spec("batched") is None:
            notes.append("batched is not installed")
        else:
            aio = importlib.import_module("batched").aio
            batched = aio.dynamically(threads.compute, batch_size=MOST_IN_BATCH, timeout_ms=WAIT_S * 1e3)
            ways["batched"] = lambda number: batched(items[number % 7])
        rates = await _rates(setting, ways, model)
        figures = {f"{name}_per_s": median(rates[name]) for name in ways if name != "ours"}
        if "batched" in ways:
            figures["times_of_batched"] = median(rates["ours"]) / median(rates["batched"])
        for name, way in ways.items():
            for load in LOADS:
                found = await _latency(way, load * median(rates[name]), setting.sizes["open_seconds"], model)
                for figure, value in zip(("p50_ms", "p99_ms"), found, strict=True):
                    figures[f"{name}_{figure}_at_{round(load * 100)}"] = value
        figures["fill"] = batcher.statistics().fill
    return Measured(rates["ours"], rates["to_thread"], figures, notes)


async def _rates(setting: Setting, ways: dict[str, Way], model: Model) -> dict[str, list[float]]:
    """Return the requests per second of closed loops, by way. The ways alternate; the first turns are not counted."""
    handlers, requests = setting.count("handlers"), setting.count("requests")
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(setting.count("repeats") + 1):
        for name, way in ways.items():
            count = 2 if repeat == 0 else requests
            began = perf_counter()
            await asyncio.gather(*[_handler(way, number, count, model) for number in range(handlers)])
            if repeat:
                rates[name].append(handlers * count / (perf_counter() - began))
    return rates


async def _handler(way: Way, number: int, requests: int, model: Model) -> None:
    result = None
    for _ in range(requests):
        result = await way(number)
    if not model.is_right(number, result):
        raise AssertionError(f"request {number} got {result}")


async def _latency(way: Way, rate: float, seconds: float, model: Model) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds at a rate of Poisson arrivals, from the scheduled time."""
    seconds = max(seconds, LEAST_ARRIVALS / rate)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    outcomes: list[Outcome] = []
    arrivals = poisson([Phase(rate, seconds)], seed=1) or [0.0]
    start = loop.time()

    async def send(outcome: Outcome) -> None:
        result = await way(outcome.number)
        outcome.answered, outcome.status = loop.time() - start, 200
        if not model.is_right(outcome.number, result):
            raise AssertionError(f"request {outcome.number} got {result}")

    for number, at in enumerate(arrivals):
        while (left := start + at - loop.time()) > 0:
            await asyncio.sleep(left if left > 2e-3 else 0)
        outcome = Outcome(number, at, reached=loop.time() - start)
        outcome.sent = outcome.reached
        outcomes.append(outcome)
        tasks.add(asyncio.create_task(send(outcome)))
    await asyncio.gather(*tasks)
    found = summarise(outcomes, float("inf"), 0.0, seconds)
    assert found.p50_ms is not None
    assert found.p99_ms is not None
    return found.p50_ms, found.p99_ms
