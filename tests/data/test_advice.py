"""Advice about loaders: following it helps, and it never contradicts the bottleneck."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest

import aiocuda
from aiocuda import BusyError, Device
from aiocuda.data import DataLoader, LoaderAdvice, LoaderStats
from aiocuda.data._advice import MOST_GROWTH, advise
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.data.decoders import FIELDS, computes_in_python, computes_natively, keeps_gil, waits
from tests.helpers import quick_probe

__all__ = ["quick_probe"]

#: Following advice makes a loader at least so many times as fast if it says that something helps, and never slower.
HELPS = 1.3
NO_SLOWER = 0.95


class Run(NamedTuple):
    rate: float  #: samples per second
    stats: LoaderStats
    advice: LoaderAdvice


async def idle(batch: Any) -> None:
    """A consumer that does nothing."""


async def load(device: Device, samples: int, consumer: Callable[[Any], Awaitable[None]] = idle, **options: Any) -> Run:
    """Load some samples, all but those of the first batch in a measured time."""
    options = {"fields": FIELDS, "batch_size": 8, "source": range(samples), **options}
    source = options.pop("source")
    async with DataLoader(device, source, **options) as loader:
        batches = aiter(loader)
        await anext(batches)
        count, began = 0, device.driver.now()
        async for batch in batches:
            count += len(batch.indices)
            await consumer(batch)
        return Run(count / (device.driver.now() - began), loader.statistics(), loader.advice())


def followed(advice: LoaderAdvice, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the advised ones."""
    return {**options, "workers": advice.workers, "prefetch": advice.prefetch, "executor": advice.executor}


async def follow(device: Device, samples: int, words: str, options: dict[str, Any], least: float) -> Run:
    """Follow the advice, which has these words, and return the run before. Again, while that helps too little.

    Other programs use the processors, too.
    """
    for _ in range(5):
        before = await load(device, samples, **options)
        after = await load(device, samples, **followed(before.advice, options))
        if words in before.advice.why and after.rate >= least * before.rate:
            break
    assert words in before.advice.why
    assert after.rate >= least * before.rate
    return before


# -- decoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(("executor", "batch_size"), [("thread", 1), ("thread", 8), ("process", 8)])
async def test_decoders_that_wait_get_more_workers_than_there_are_processors(
    device: Device, executor: Any, batch_size: int
) -> None:
    options = {"decode": waits, "workers": 2, "batch_size": batch_size, "executor": executor}
    words = "of its time: more workers= help, also more than there are processors"
    before = await follow(device, 200, words, options, HELPS)
    assert 4 <= before.advice.workers <= 2 * MOST_GROWTH[executor]
    assert before.advice.executor == executor
    assert before.advice.prefetch * batch_size >= before.advice.workers
    assert 0 < before.stats.decode_cpu_seconds <= 0.2 * before.stats.decode_seconds


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_probe")
@pytest.mark.parametrize("workers", [2, 14])
async def test_decoders_that_share_the_gil_get_processes(device: Device, workers: int) -> None:
    options: dict[str, Any] = {"decode": keeps_gil, "workers": workers}
    before = await follow(device, 320, "executor='process' ends these waits", options, HELPS)
    assert before.stats.bottleneck().name == "decode"
    assert before.advice.executor == "process"


def step() -> None:
    """A training step, which releases the GIL several times, as one that enqueues work on a device."""
    for _ in range(5):
        time.sleep(1e-4)  # noqa: TID251 - as such a step, it blocks its thread


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_probe")
async def test_training_loop_that_waits_for_the_gil_is_not_the_bottleneck(device: Device) -> None:
    async def consumer(batch: Any) -> None:
        step()

    options: dict[str, Any] = {"decode": keeps_gil, "workers": 14, "consumer": consumer}
    before = await follow(device, 320, "the consumer has each batch for", options, HELPS)
    assert before.stats.consumer_seconds > before.stats.decode_seconds / before.stats.workers
    assert before.stats.bottleneck().name == "decode"
    assert "of that are waits for the GIL" in before.advice.why
    assert before.advice.executor == "process"


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Other programs have most of all processors."""
    with contextlib.ExitStack() as stack:
        for _ in range(4 * (os.cpu_count() or 1)):
            program = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(program.kill)
        yield


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("quick_probe")
@pytest.mark.parametrize("decode", [computes_natively, computes_in_python])
async def test_decoder_that_computes_on_a_busy_machine_is_said_to_be_queued(device: Device, decode: Any) -> None:
    with busy_machine():
        run = await load(device, 200, decode=decode, workers=1)
    assert "decode: " in run.advice.why
    assert "other programs have the processors: decode= is queued for a processor for" in run.advice.why
    assert "GIL" not in run.advice.why.replace("waits for the GIL are not measured", "")
    assert (run.advice.workers, run.advice.executor) == (1, "thread")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_processor_time_of_processes_is_that_of_the_decoder(device: Device) -> None:
    run = await load(device, 64, decode=computes_in_python, workers=1, executor="process")
    stats = run.stats
    assert stats.decode_cpu_seconds + stats.decode_queued_seconds >= 0.5 * stats.decode_seconds
    assert stats.gil_share is None


# -- in virtual time ---------------------------------------------------------------------------------------------------


def in_virtual_time(main: Callable[[Device, SimulatedDriver], Awaitable[None]]) -> None:
    async def run() -> None:
        driver = SimulatedDriver(None)
        async with aiocuda.open_device(driver=driver) as device:
            await main(device, driver)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(run())


def takes(driver: SimulatedDriver, seconds: float) -> Callable[[Any, Any], None]:
    """A decoder that takes so long."""

    def decode(sample: Any, out: Any) -> None:
        driver.advance_time(seconds)
        out["x"][...] = sample

    return decode


def test_slow_consumer_stays_the_bottleneck_and_needs_fewer_workers() -> None:
    async def slow(batch: Any) -> None:
        await asyncio.sleep(0.016)

    async def main(device: Device, driver: SimulatedDriver) -> None:
        options: dict[str, Any] = {"decode": takes(driver, 50e-6), "workers": 8, "consumer": slow}
        before = await follow(device, 96, "only a quicker consumer helps", options, NO_SLOWER)
        assert before.stats.bottleneck().name == "consumer"
        assert 1 <= before.advice.workers < 8
        quick = await load(device, 96, **{**options, "consumer": idle})
        assert quick.rate >= HELPS * before.rate

    in_virtual_time(main)


def test_nothing_of_the_host_is_measured_in_virtual_time() -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        run = await load(device, 40, decode=takes(driver, 0.2))
        assert run.stats.decode_cpu_seconds == run.stats.decode_seconds
        assert run.stats.process_cpu_seconds == run.stats.decode_queued_seconds == 0
        assert "GIL" not in run.advice.why

    in_virtual_time(main)


@pytest.mark.parametrize("source", [range(64), map(int, range(64))])
def test_there_are_no_more_workers_than_samples(source: Any) -> None:
    async def main(device: Device, driver: SimulatedDriver) -> None:
        run = await load(device, 64, source=source, decode=takes(driver, 1e-3), workers=256)
        assert run.advice.workers <= 64

    in_virtual_time(main)


# -- the texts ---------------------------------------------------------------------------------------------------------

#: All figures are 0, for one worker.
_FIGURES: dict[str, Any] = {
    field.name: 0 for field in dataclasses.fields(LoaderStats) if field.default is dataclasses.MISSING
}
NOTHING = LoaderStats(**{**_FIGURES, "workers": 1})


def stats(**seconds: Any) -> LoaderStats:
    """Statistics of 100 batches in one second."""
    return dataclasses.replace(NOTHING, batches=100, samples=800, wall_seconds=1.0, **seconds)


@pytest.mark.parametrize(
    ("measured", "processors", "name", "workers", "executor", "words"),
    [
        # Python code on two threads; the same on one processor
        ({"workers": 2, "decode": 1.9, "cpu": 0.95, "gil_share": 0.95},
         8, "decode", 8, "process", "have it for 90% of the time, so more threads would only wait for it"),
        ({"workers": 2, "decode": 1.9, "cpu": 0.95, "gil_share": 0.95},
         1, "decode", 2, "thread", "only a quicker decode= helps"),
        # a consumer that waits for the GIL: much, a little, not at all, or perhaps
        ({"workers": 8, "decode": 3.0, "cpu": 0.8, "consumer_seconds": 0.9, "gil_share": 0.9},
         8, "decode", 8, "process", "up to 7.65 ms of that are waits for the GIL"),
        ({"workers": 8, "decode": 1.0, "cpu": 0.3, "consumer_seconds": 0.9, "gil_share": 0.3},
         8, "consumer", 2, "thread", "a quicker consumer helps; to see how much of it is the GIL"),
        ({"workers": 8, "decode": 1.0, "cpu": 0.1, "consumer_seconds": 0.9, "gil_share": 0.1},
         8, "consumer", 2, "thread", "longer than loading takes: only a quicker consumer helps"),
        ({"workers": 8, "decode": 1.0, "cpu": 0.3, "consumer_seconds": 0.9},
         8, "consumer", 2, "thread", "longer than loading takes: a quicker consumer helps"),
        # another part takes longest; none is at work all the time; all are quick beside the consumer
        ({"decode": 0.5, "cpu": 0.1, "source_seconds": 0.9, "gil_share": 0.1},
         8, "source", 1, "thread", "a source with __len__ and __getitem__ is read by all workers"),
        ({"decode": 0.5, "cpu": 0.1, "upload_seconds": 0.9, "gil_share": 0.1},
         8, "upload", 1, "thread", "smaller samples help, such as uint8 instead of float32"),
        ({"decode": 0.5, "cpu": 0.1, "consumer_seconds": 0.7, "gil_share": 0.1},
         8, "consumer", 1, "thread", "only 70% of the time. In the rest it waits for the other parts, as at the start"),
        ({"decode": 0.02, "cpu": 0.0, "consumer_seconds": 0.95, "upload_seconds": 0.0, "gil_share": 0.1},
         8, "consumer", 1, "thread", "loading takes less than a twentieth of the consumer's time: without a loader it"),
        # it computes: without the GIL, or perhaps with it
        ({"workers": 1, "decode": 1.0, "cpu": 0.98, "gil_share": 0.05},
         8, "decode", 8, "thread", "1 worker decodes at a time, on 8 processors: more workers=, or a quicker decode="),
        ({"workers": 1, "decode": 1.0, "cpu": 0.98},
         8, "decode", 8, "thread", "unless decode= computes in Python, where threads share the GIL. Waits for it are"),
        # it waits, also beside a loop that has the GIL for half of the time
        ({"workers": 2, "decode": 2.0, "cpu": 1.0, "gil_share": 0.1},
         4, "decode", 8, "thread", "waits for 50% of its time: more workers= help, also more than there are"),
        ({"workers": 2, "decode": 1.9, "cpu": 0.04, "process_cpu_seconds": 0.6, "gil_share": 0.5},
         2, "decode", 16, "thread", "waits for 98% of its time: more workers= help, also more than there are"),
        ({"workers": 2, "decode": 2.0, "cpu": 0.1, "queued": 0.6, "gil_share": 0.1},
         2, "decode", 16, "thread", "waits for 65% of its time: more workers= help, also more than there are"),
        # all processors are used, by decoding or by threads of a library; too many workers share them
        ({"workers": 4, "decode": 4.0, "cpu": 3.97, "gil_share": 0.1},
         4, "decode", 4, "thread", "uses 4.0 of 4 processors: only a quicker decode="),
        ({"workers": 4, "decode": 4.0, "cpu": 0.1, "process_cpu_seconds": 4.0, "gil_share": 0.1},
         4, "decode", 4, "thread", "uses 4.0 of 4 processors: only a quicker decode="),
        ({"workers": 64, "decode": 64.0, "cpu": 3.95, "queued": 60.0, "gil_share": 0.1},
         4, "decode", 4, "thread", "uses 4.0 of 4 processors: only a quicker decode="),
        # other programs have them, also beside Python code; or the control group has no more
        ({"workers": 2, "decode": 2.0, "cpu": 0.2, "queued": 1.8, "gil_share": 0.1},
         8, "decode", 2, "thread", "other programs have the processors: decode= is queued for a processor for 90% of"),
        ({"workers": 1, "decode": 0.8, "cpu": 0.1, "queued": 0.7, "consumer_seconds": 0.9, "gil_share": 1.0},
         8, "decode", 1, "thread", "other programs have the processors: decode= is queued for a processor for 87% of"),
        ({"workers": 2, "decode": 2.0, "cpu": 0.9, "queued": 1.1, "throttled_share": 0.6},
         1, "decode", 1, "thread", "the control group has used up its quota in 60% of the periods: decode= is queued"),
        # other threads have the GIL
        ({"workers": 2, "decode": 2.0, "cpu": 0.5, "process_cpu_seconds": 1.5, "gil_share": 1.0},
         8, "decode", 2, "thread", "mostly by other threads of the program"),
        # processes wait, and each has a GIL of its own
        ({"workers": 2, "decode": 2.0, "cpu": 0.1, "executor": "process"},
         2, "decode", 8, "process", "waits for 95% of its time: more workers= help, also more than there are"),
    ],
)  # fmt: skip
def test_reasons(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any], processors: int, name: str, workers: int, executor: str,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors))
    names = {"decode": "decode_seconds", "cpu": "decode_cpu_seconds", "queued": "decode_queued_seconds"}
    seconds = {names.get(key, key): value for key, value in measured.items()}
    made = stats(**{"process_cpu_seconds": measured["cpu"] + 0.05, "upload_seconds": 0.01, **seconds})
    found, advice = made.bottleneck(), advise(made, 8, 3, 800)
    assert (found.name, advice.workers, advice.executor) == (name, workers, executor)
    assert words in advice.why
    assert advice.why.startswith(f"{found.name}: {found.why}; ")  # they never contradict each other
    assert advice.period_ms == 10
    if advice.workers > made.workers:
        assert re.search("more workers=.* help|ends these waits", found.why)
    changed = (advice.workers, advice.executor, advice.prefetch) != (made.workers, made.executor, 3)
    assert ("measure again" in advice.why) == changed
    not_measured = made.executor == "thread" and made.gil_share is None
    assert ("waits for the GIL are not measured" in advice.why) == not_measured
    few = advise(made, 8, 3, 5)
    assert few.workers == min(5, advice.workers)
    assert ("with 5 samples" in few.why) == (advice.workers > 5)


def test_time_for_the_start_of_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    measured = {"decode_seconds": 1.9, "decode_cpu_seconds": 0.95, "process_cpu_seconds": 1.0}
    threads = advise(stats(workers=2, gil_share=0.95, **measured), 8, 3, 800)
    assert "imported once more, and statistics().start_seconds is that time" in threads.why
    processes = advise(stats(workers=2, executor="process", start_seconds=1.234, **measured), 8, 3, 800)
    assert "the processes were ready 1.2 s after the loader had begun to open" in processes.why
    assert "start_seconds" not in advise(stats(workers=2, gil_share=0.1, **measured), 8, 3, 800).why


def test_no_time_at_all_is_no_error() -> None:
    made = dataclasses.replace(NOTHING, batches=1)
    assert advise(made, 8, 3, 8).period_ms == 0
    assert made.bottleneck().kind == "nothing"
    with pytest.raises(BusyError, match="no batch has been delivered"):
        advise(NOTHING, 8, 3, 8)
