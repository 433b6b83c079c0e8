"""Advice about loaders: following it helps, and it never contradicts the bottleneck."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiocuda
from aiocuda import BusyError, Device
from aiocuda._base._host_use import _sampler
from aiocuda.data import DataLoader, LoaderAdvice, LoaderStats, sync_loader
from aiocuda.data._limits import MOST_GROWTH, limit_of
from aiocuda.data._statistics import advise, times_of
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.data.decoders import FIELDS, computes_in_python, computes_natively, keeps_gil, waits
from tests.helpers import until

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


async def load_until(is_expected: Callable[[Run], bool], device: Device, samples: int, **options: Any) -> Run:
    """Load until a run is as expected, at most five times: other programs use the processors, too."""
    for _ in range(5):
        run = await load(device, samples, **options)
        if is_expected(run):
            break
    return run


def followed(advice: LoaderAdvice, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the advised ones."""
    return {**options, "workers": advice.workers, "prefetch": advice.prefetch, "executor": advice.executor}


async def gain(device: Device, samples: int, options: dict[str, Any], changed: dict[str, Any], least: float) -> float:
    """How many times as fast the changed arguments are.

    Other programs use the processors, too. So there are more runs of both, in turn, while it is not ``least``.
    """
    found = 0.0
    for _ in range(5):
        before, after = await load(device, samples, **options), await load(device, samples, **changed)
        found = max(found, after.rate / before.rate)
        if found >= least:
            break
    return found


# -- decoders that wait ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("batch_size", [1, 8])
async def test_decoders_that_wait_get_more_workers_than_there_are_processors(device: Device, batch_size: int) -> None:
    options: dict[str, Any] = {"decode": waits, "workers": 2, "batch_size": batch_size}
    for _ in range(5):  # other programs use the processors, too
        before = await load(device, 200, **options)
        if before.advice.workers >= 8:
            break
    assert before.advice.workers >= 8
    assert before.advice.executor == "thread"
    assert before.advice.prefetch * batch_size >= before.advice.workers
    assert before.stats.decode_cpu_seconds <= 0.2 * before.stats.decode_seconds
    assert "of its time: more workers= help, also more than there are processors" in before.advice.why
    assert await gain(device, 200, options, followed(before.advice, options), HELPS) >= HELPS


@pytest.mark.slow
@pytest.mark.asyncio
async def test_processes_that_wait_get_more_workers_and_stay_processes(device: Device) -> None:
    options: dict[str, Any] = {"decode": waits, "workers": 2, "executor": "process"}
    before = await load(device, 200, **options)
    assert 4 <= before.advice.workers <= 2 * MOST_GROWTH["process"]
    assert before.advice.executor == "process"
    assert await gain(device, 200, options, followed(before.advice, options), HELPS) >= HELPS


# -- decoders that compute -------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("workers", [1, 2, 14])
async def test_decoders_that_share_the_gil_get_processes(device: Device, workers: int) -> None:
    options: dict[str, Any] = {"decode": keeps_gil, "workers": workers}
    before = await load(device, 240, **options)
    assert before.stats.bottleneck().name == "decode"
    assert before.advice.executor == "process"
    assert before.advice.workers >= 2
    assert "executor='process' ends these waits" in before.advice.why
    assert await gain(device, 240, options, followed(before.advice, options), HELPS) >= HELPS


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("workers", [1, 2])
async def test_decoders_in_python_get_processes(device: Device, workers: int) -> None:
    options: dict[str, Any] = {"decode": computes_in_python, "workers": workers}
    advice = (await load_until(lambda run: run.advice.executor == "process", device, 300, **options)).advice
    assert advice.executor == "process"
    assert await gain(device, 300, options, followed(advice, options), NO_SLOWER) >= NO_SLOWER


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
async def test_decoders_without_the_gil_get_a_thread_for_each_processor(device: Device) -> None:
    options: dict[str, Any] = {"decode": computes_natively, "workers": 1}
    advice = (await load(device, 500, **options)).advice
    assert advice.workers >= 2
    assert advice.executor == "thread"
    assert await gain(device, 500, options, followed(advice, options), NO_SLOWER) >= NO_SLOWER


# -- consumer, source and upload -------------------------------------------------------------------------------------


def step() -> None:
    """A training step, which releases the GIL several times, as one that enqueues work on a device."""
    for _ in range(5):
        time.sleep(1e-4)  # noqa: TID251 - as such a step, it blocks its thread


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.asyncio
async def test_training_loop_that_waits_for_the_gil_is_not_the_bottleneck(device: Device) -> None:
    async def consumer(batch: Any) -> None:
        step()

    options: dict[str, Any] = {"decode": keeps_gil, "workers": 14, "consumer": consumer}
    before = await load(device, 240, **options)
    assert before.stats.consumer_seconds > before.stats.decode_seconds / before.stats.workers
    found = before.stats.bottleneck()
    assert found.name == "decode"
    assert found.share >= 0.4
    assert "the consumer has each batch for" in found.why
    assert "of that are waits for the GIL" in found.why
    assert before.advice.executor == "process"
    assert await gain(device, 240, options, followed(before.advice, options), HELPS) >= HELPS


@pytest.mark.slow
def test_training_loop_of_another_thread_is_not_the_bottleneck() -> None:
    with sync_loader(range(300), driver="host", fields=FIELDS, decode=keeps_gil, batch_size=8, workers=8) as batches:
        for _ in batches:
            step()
        assert batches.statistics().bottleneck().name == "decode"
        assert batches.advice().executor == "process"


def test_slow_consumer_stays_the_bottleneck_and_needs_fewer_workers() -> None:
    """In virtual time: on a busy machine, decoders of the same consumer may be the slower part."""

    async def slow(batch: Any) -> None:
        await asyncio.sleep(0.016)

    async def main() -> None:
        driver = SimulatedDriver(None)

        def decode(sample: Any, out: Any) -> None:
            driver.advance_time(50e-6)
            out["x"][...] = sample

        async with aiocuda.open_device(driver=driver) as device:
            options: dict[str, Any] = {"decode": decode, "workers": 8, "consumer": slow}
            before = await load(device, 96, **options)
            assert before.stats.bottleneck().name == "consumer"
            assert "only a quicker consumer helps" in before.advice.why
            assert 1 <= before.advice.workers < 8
            after = await load(device, 96, **followed(before.advice, options))
            assert after.rate >= NO_SLOWER * before.rate
            quick = await load(device, 96, **{**options, "consumer": idle})
            assert quick.rate >= HELPS * before.rate

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_consumer_whose_times_vary_gets_more_batches_ahead(device: Device) -> None:
    async def bursts(batch: Any) -> None:
        if batch.number % 4 == 0:
            await asyncio.sleep(0.05)

    options: dict[str, Any] = {"decode": waits, "workers": 1, "batch_size": 4, "prefetch": 1, "consumer": bursts}
    before = await load_until(lambda run: "prefetch= may help" in run.advice.why, device, 120, **options)
    assert "prefetch= may help" in before.advice.why
    assert before.advice.prefetch > 1
    assert await gain(device, 120, options, followed(before.advice, options), 1.1) >= 1.1


@pytest.mark.slow
@pytest.mark.asyncio
async def test_source_that_all_workers_read_is_quicker_than_one_that_a_thread_reads(device: Device) -> None:
    class Slow:
        def __len__(self) -> int:
            return 160

        def __getitem__(self, index: int) -> int:
            time.sleep(2e-3)  # noqa: TID251 - a slow source
            return index

    def trickle() -> Iterator[int]:
        for number in range(160):
            yield Slow()[number]

    def write(sample: Any, out: Any) -> None:
        out["x"][...] = sample

    options: dict[str, Any] = {"decode": write, "workers": 4}
    before = await load(device, 160, source=trickle(), **options)
    assert before.stats.bottleneck().name == "source"
    assert "a source with __len__ and __getitem__ is read by all workers" in before.advice.why
    after = await load(device, 160, source=Slow(), **options)
    assert after.rate >= HELPS * before.rate


def test_smaller_samples_help_where_the_link_is_the_limit() -> None:
    def nothing(sample: Any, out: Any) -> None:
        pass

    async def main() -> None:
        async with aiocuda.open_device(driver=SimulatedDriver(None, bandwidth=2e8)) as device:
            options: dict[str, Any] = {"decode": nothing, "workers": 2, "batch_size": 1}
            before = await load(device, 24, fields={"x": ((1 << 19,), np.float32)}, **options)
            assert before.stats.bottleneck().name == "upload"
            assert "smaller samples help, such as uint8" in before.advice.why
            after = await load(device, 24, fields={"x": ((1 << 19,), np.uint8)}, **options)
        assert after.rate == pytest.approx(4 * before.rate, rel=0.1)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(main())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_without_a_loader_it_is_nearly_as_quick_where_the_advice_says_so(device: Device) -> None:
    async def slow(batch: Any) -> None:
        await asyncio.sleep(0.1)

    options: dict[str, Any] = {"decode": waits, "workers": 1, "batch_size": 1}
    words = "without a loader it is nearly as quick"
    before = await load_until(lambda run: words in run.advice.why, device, 8, consumer=slow, **options)
    assert words in before.advice.why
    began = device.driver.now()
    async with device.stream() as stream:
        for sample in range(8):
            out = {"x": np.empty(4, np.float32)}
            waits(sample, out)
            await slow(await stream.upload(out["x"]))
    assert 8 / (device.driver.now() - began) >= 0.8 * before.rate


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_period_is_the_measured_one(device: Device) -> None:
    """What other arguments give is known when they have run."""
    run = await load(device, 48, decode=waits, workers=2)
    assert run.advice.period_ms == pytest.approx(1e3 * run.stats.wall_seconds / run.stats.batches, rel=0.05)
    assert run.advice.workers > 2
    assert "measure again" in run.advice.why


@pytest.mark.asyncio
async def test_gil_is_sampled_while_threads_decode() -> None:
    options: dict[str, Any] = {"fields": FIELDS, "decode": waits, "batch_size": 2}
    async with aiocuda.open_device(driver="host") as device:
        await until(lambda: not _sampler.is_at_work)
        async with DataLoader(device, range(40), **options) as loader:
            assert not _sampler.is_at_work
            await anext(aiter(loader))
            await until(lambda: _sampler.is_at_work)
        await until(lambda: not _sampler.is_at_work, "the end with the loader")
        async with DataLoader(device, range(40), **options) as loader:
            async for _ in loader:
                pass
            await until(lambda: not _sampler.is_at_work, "the end with the epoch")


def test_nothing_of_the_host_is_measured_in_virtual_time() -> None:
    async def main() -> LoaderStats:
        await until(lambda: not _sampler.is_at_work)
        async with aiocuda.open_device(driver=SimulatedDriver(1)) as device:
            async with DataLoader(device, range(40), fields=FIELDS, decode=computes_in_python, batch_size=4) as loader:
                async for _ in loader:
                    assert not _sampler.is_at_work
                assert loader.advice().executor == "thread"
                return loader.statistics()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        stats = runner.run(main())
    assert stats.decode_cpu_seconds == stats.decode_seconds
    assert stats.process_cpu_seconds == 0
    assert stats.gil_share is None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_processor_time_of_processes_is_that_of_the_decoder(device: Device) -> None:
    def computes(run: Run) -> bool:
        return run.stats.decode_cpu_seconds >= 0.2 * run.stats.decode_seconds

    run = await load_until(computes, device, 64, decode=computes_in_python, workers=1, executor="process")
    assert run.stats.executor == "process"
    assert computes(run)
    assert run.stats.gil_share is None
    run = await load(device, 160, fields=None, decode=lists, workers=1, executor="process")
    assert 0 < run.stats.decode_cpu_seconds <= 0.5 * run.stats.decode_seconds


def lists(sample: Any) -> Any:
    """Wait, and return an array, which the process sends back."""
    time.sleep(2e-3)  # noqa: TID251 - it stands for a file
    return np.zeros(4)


# -- the texts -------------------------------------------------------------------------------------------------------

#: All figures are 0, for one worker.
_FIGURES: dict[str, Any] = {
    field.name: 0 for field in dataclasses.fields(LoaderStats) if field.default is dataclasses.MISSING
}
NOTHING = LoaderStats(**{**_FIGURES, "workers": 1})


def stats(**seconds: Any) -> LoaderStats:
    """Statistics of 100 batches in one second."""
    return dataclasses.replace(NOTHING, batches=100, samples=800, wall_seconds=1.0, **seconds)


@pytest.mark.parametrize("seed", range(4))
def test_advice_and_bottleneck_have_one_reason(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        made = any_statistics(chance)
        found, advice = made.bottleneck(), advise(made, 8, 3)
        assert advice.why.startswith(f"{found.name}: {found.why}; ")
        assert advice.prefetch >= 3
        assert 1 <= advice.workers <= MOST_GROWTH["thread"] * made.workers
        if advice.workers > made.workers:
            assert "more workers= do not" not in found.why
            assert re.search(
                "more workers=(, or a quicker decode=,)? help|executor='process' ends these waits", found.why
            )
        if (advice.workers, advice.executor, advice.prefetch) != (made.workers, made.executor, 3):
            assert "measure again" in advice.why


def any_statistics(chance: random.Random) -> LoaderStats:
    workers = chance.choice([1, 2, 4, 14, 64])
    decode = chance.uniform(0, workers)
    return stats(
        workers=workers,
        executor=chance.choice(["thread", "process"]),
        decode_seconds=decode,
        decode_cpu_seconds=decode * chance.choice([0.01, 0.3, 0.5, 1.0]),
        process_cpu_seconds=chance.uniform(0, 2),
        source_seconds=chance.choice([0.0, chance.random()]),
        upload_seconds=chance.choice([0.01, chance.random()]),
        consumer_seconds=chance.choice([0.01, chance.random()]),
        gil_share=chance.choice([None, 0.0, 0.1, 0.5, 0.9, 1.0]),
    )


@pytest.mark.parametrize(
    ("seconds", "processors", "name", "workers", "executor", "words"),
    [
        # Python code on two threads; the same on one processor
        ({"workers": 2, "decode_seconds": 1.9, "decode_cpu_seconds": 0.95, "gil_share": 0.95},
         8, "decode", 8, "process", "have it for 90% of the time, so more threads would only wait for it"),
        ({"workers": 2, "decode_seconds": 1.9, "decode_cpu_seconds": 0.95, "gil_share": 0.95},
         1, "decode", 2, "thread", "only a quicker decode= helps"),
        # a consumer that waits for the GIL: much, a little, or perhaps
        ({"workers": 8, "decode_seconds": 3.0, "decode_cpu_seconds": 0.8, "consumer_seconds": 0.9, "gil_share": 0.9},
         8, "decode", 8, "process", "up to 7.62 ms of that are waits for the GIL"),
        ({"workers": 8, "decode_seconds": 1.0, "decode_cpu_seconds": 0.3, "consumer_seconds": 0.9, "gil_share": 0.3},
         8, "consumer", 2, "thread", "a quicker consumer helps; to see how much of it is the GIL"),
        ({"workers": 8, "decode_seconds": 1.0, "decode_cpu_seconds": 0.3, "consumer_seconds": 0.9},
         8, "consumer", 2, "thread", "If decode= computes in Python"),
        ({"workers": 8, "decode_seconds": 1.0, "decode_cpu_seconds": 0.1, "consumer_seconds": 0.9, "gil_share": 0.1},
         8, "consumer", 2, "thread", "only a quicker consumer helps"),
        # it is not known whether threads share the GIL
        ({"workers": 2, "decode_seconds": 2.0, "decode_cpu_seconds": 1.0},
         8, "decode", 15, "thread", "where threads share the GIL, or the processors are busy. To find out"),
        # waits, or a processor that other programs use
        ({"workers": 2, "decode_seconds": 2.0, "decode_cpu_seconds": 1.0, "gil_share": 0.1},
         4, "decode", 8, "thread", "and not if it waits for a processor. To find out, look at `top`"),
        # waits, beside a loop that has the GIL for half of the time
        ({"workers": 2, "decode_seconds": 1.9, "decode_cpu_seconds": 0.04, "process_cpu_seconds": 0.6, "gil_share": .5},
         2, "decode", 8, "thread", "waits for 98% of its time: more workers= help, also more than there are"),
        # all processors are used, by decoding or by threads of a library
        ({"workers": 4, "decode_seconds": 4.0, "decode_cpu_seconds": 3.97, "gil_share": 0.1},
         4, "decode", 4, "thread", "uses 4.0 of 4 processors: only a quicker decode="),
        ({"workers": 4, "decode_seconds": 4.0, "decode_cpu_seconds": 0.1, "process_cpu_seconds": 4.0, "gil_share": 0.1},
         4, "decode", 4, "thread", "uses 4.0 of 4 processors: only a quicker decode="),
        # other threads have the GIL
        ({"workers": 2, "decode_seconds": 2.0, "decode_cpu_seconds": 0.5, "process_cpu_seconds": 1.5, "gil_share": 1.0},
         8, "decode", 2, "thread", "mostly by other threads of the program"),
    ],
)  # fmt: skip
def test_reasons(seconds: dict[str, Any], processors: int, name: str, workers: int, executor: str, words: str) -> None:
    cpu = seconds.get("decode_cpu_seconds", 0.0) + 0.05
    limit = limit_of(times_of(stats(**{"process_cpu_seconds": cpu, "upload_seconds": 0.01, **seconds})), processors)
    assert (limit.name, limit.workers, limit.executor) == (name, workers, executor)
    assert words in limit.why


def test_no_time_at_all_is_no_error() -> None:
    made = dataclasses.replace(NOTHING, batches=1)
    assert advise(made, 8, 3).period_ms == 0
    assert made.bottleneck().kind == "nothing"
    with pytest.raises(BusyError, match="no batch has been delivered"):
        advise(NOTHING, 8, 3)
