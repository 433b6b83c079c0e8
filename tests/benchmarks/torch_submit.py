"""A row about `aiocuda.integrations.torch.submit`, in short slices of one process; and its profile.

64 handlers each send batches of 64 rows through the small model of `services`. The ways alternate:

- ours: ``submit``, on four streams;
- ``switched``: PyTorch on the loop with what `submit` cannot do without: each request switches to one of four streams,
  records an event, waits for it, which holds the loop, and then gives the loop away once by ``sleep(0)``;
- ``on_loop``: PyTorch on the loop and its current stream, with one ``sleep(0)`` for each request.

``python -m tests.benchmarks.torch_submit --profile FILE`` writes what `cProfile` sees of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import importlib.util
import pstats
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import aiocuda

from . import services
from .figures import Measured
from .runs import Runs
from .setting import Setting, open_setting
from .turns import TurnMeter, metered_loop

__all__ = ["Model", "main", "model_of", "rates_compared", "torch_submit"]

Way = Callable[[int], Awaitable[object]]


class Model(services.Model, Protocol):
    """A model that can switch streams by itself."""

    def streams(self, count: int) -> list[Any]:
        """Return so many streams of PyTorch."""

    def switched(self, slot: Any, stream: Any) -> None:
        """Do one request on that stream, with one event, and wait for it."""

    def switch(self, stream: Any) -> None:
        """Make that stream the current one, and go back."""

    def small(self) -> Callable[[], None]:
        """Return a function that enqueues one small kernel on the current stream."""

    def submit_function(self, stream: aiocuda.Stream, function: Callable[[], None]) -> Awaitable[None]:
        """Submit a function to a stream of aiocuda."""


class TorchModel(services.TorchModel):
    """The model in PyTorch, on a GPU."""

    def streams(self, count: int) -> list[Any]:
        return [self._torch.cuda.Stream() for _ in range(count)]

    def switched(self, slot: Any, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            self.compute(slot)
            slot.event.record()
        slot.event.synchronize()

    def switch(self, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            pass

    def small(self) -> Callable[[], None]:
        ones = self._torch.ones(64, device="cuda")

        def add() -> None:
            ones.add_(1)

        return add

    def submit_function(self, stream: aiocuda.Stream, function: Callable[[], None]) -> Awaitable[None]:
        operation: aiocuda.Operation[None] = self._ours.submit(stream, function)
        return operation


class NumpyModel(services.NumpyModel):
    """The model in NumPy, on the host."""

    def streams(self, count: int) -> list[Any]:
        return [None] * count

    def switched(self, slot: Any, stream: Any) -> None:
        self.compute(slot)

    def switch(self, stream: Any) -> None: ...

    def small(self) -> Callable[[], None]:
        return lambda: None

    def submit_function(self, stream: aiocuda.Stream, function: Callable[[], None]) -> Awaitable[None]:
        return stream.submit(function)


def model_of(setting: Setting) -> tuple[Model, list[str]]:
    """Return the model for the device, and the notes of a row that has it."""
    rows = setting.count("rows")
    if setting.device.driver.name == "cuda" and importlib.util.find_spec("torch") is not None:
        return TorchModel(rows), []
    return NumpyModel(rows), ["PyTorch on a GPU is missing: the model is NumPy's"]


class _Service:
    """The handlers, and the ways to serve them."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.model, self.notes = model_of(setting)
        self.ours = [setting.stream() for _ in range(setting.count("streams"))]
        self.switched = self.model.streams(len(self.ours))
        self._slots = [self.model.slot() for _ in range(setting.count("handlers"))]
        self.ways: dict[str, Way] = {"ours": self._submit, "switched": self._switch, "on_loop": self._on_loop}

    async def _submit(self, number: int) -> None:
        await self.model.submit(self.ours[number % len(self.ours)], self._slots[number])

    async def _switch(self, number: int) -> None:
        self.model.switched(self._slots[number], self.switched[number % len(self.switched)])
        await asyncio.sleep(0)

    async def _on_loop(self, number: int) -> None:
        self.model.blocking(self._slots[number])
        await asyncio.sleep(0)

    async def rate(self, way: Way, seconds: float) -> float:
        """Return requests per second of all handlers, which begin none after ``seconds``. Raise for a wrong result."""
        start = perf_counter()

        async def handler(number: int) -> int:
            done = 0
            while perf_counter() < start + seconds or not done:
                await way(number)
                done += 1
            return done

        done = sum(await asyncio.gather(*map(handler, range(len(self._slots)))))
        rate = done / (perf_counter() - start)
        for slot in self._slots:
            self.model.check(slot)
        return rate

    async def parts(self, count: int) -> dict[str, float]:
        """Return µs of a switch of streams, of a submit of nothing, and of one with a small kernel, both awaited."""
        small, stream = self.model.small(), self.ours[0]
        start = perf_counter()
        for _ in range(count):
            self.model.switch(self.switched[0])
        figures = {"switch_us": (perf_counter() - start) / count * 1e6}
        for name, function in (("submit_nothing_us", _nothing), ("submit_small_us", small)):
            start = perf_counter()
            for _ in range(count):
                await self.model.submit_function(stream, function)
            figures[name] = (perf_counter() - start) / count * 1e6
        return figures


def _nothing() -> None: ...


async def torch_submit(setting: Setting) -> Measured:
    """Requests per second of all handlers, by ``submit``.

    Baseline: ``switched``. Figures: requests per second of the others; ``of_switched`` and ``of_on_loop``, ratios of
    medians of one run; µs of the parts; the longest iteration of the loop with ours. Bound: at least 0.90 of
    ``switched`` in the worst run.
    """
    service, runs, seconds = _Service(setting), Runs(), setting.sizes["slice"]
    measured = Measured([], notes=list(service.notes))
    await service.parts(1)
    for way in service.ways.values():
        await service.rate(way, seconds / 3)  # kernels are loaded
    for _ in range(setting.count("runs")):
        rates: dict[str, list[float]] = {name: [] for name in service.ways}
        longest = 0.0
        for _ in range(setting.count("repeats")):
            for name, way in service.ways.items():
                setting.turns.reset()
                rates[name].append(await service.rate(way, seconds))
                if name == "ours":
                    longest = max(longest, setting.turns.longest())
        measured.samples.extend(rates["ours"])
        measured.baseline.extend(rates["switched"])
        parts = await service.parts(setting.count("launches"))
        runs.add(rates_compared(rates) | parts | {"longest_turn_ms": longest * 1e3})
    measured.figures.update(runs.medians() | runs.worst("higher", "of_switched"))
    return measured


def rates_compared(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the figures of one run, from the rates of each way."""
    middle = {name: median(values) for name, values in rates.items()}
    ours = middle.pop("ours")
    return {
        **{f"{name}_per_s": rate for name, rate in middle.items()},
        **{f"of_{name}": ours / rate for name, rate in middle.items()},
    }


async def _profile(driver: str, path: Path, seconds: float, turns: TurnMeter) -> float:
    """Write a profile of ours, and return its requests per second."""
    from .rows import ROWS

    profile, sizes = cProfile.Profile(), ROWS["torch_submit"].size(driver == "host")
    async with open_setting(driver, sizes, turns) as setting:
        service = _Service(setting)
        way = service.ways["ours"]
        await service.rate(way, seconds / 3)
        profile.enable()
        rate = await service.rate(way, seconds)
        profile.disable()
    profile.dump_stats(path)
    return rate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.torch_submit", description="Profile submit.")
    parser.add_argument("--profile", type=Path, metavar="FILE", required=True, help="write what cProfile saw here")
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--lines", type=int, default=40, help="functions to print (default %(default)s)")
    given = parser.parse_args(argv)
    loop, turns = metered_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        rate = runner.run(_profile(given.driver, given.profile, given.seconds, turns))
    print(f"{rate:.0f} requests/s under the profiler")
    pstats.Stats(str(given.profile)).sort_stats("tottime").print_stats(given.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
