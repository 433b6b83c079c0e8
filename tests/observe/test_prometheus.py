"""R4: statistics as metrics for Prometheus."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import importlib
import pkgutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    DeviceFault,
    EventPool,
    InvalidArgumentError,
    InvalidTypeError,
    NoEventLoopError,
    Pipeline,
    Stage,
    Stream,
    StreamPool,
)
from aiocuda._base._collections import COLLECTIONS
from aiocuda.data import DataLoader
from aiocuda.driver.host import HostDriver
from aiocuda.memory.adaptors import StatisticsResource
from aiocuda.observe._metrics import EXCLUDED, NESTED, TABLES
from aiocuda.serving import Batch, MicroBatcher
from tests.helpers import AFFINE, PATIENCE, TRAP, quickly, until

prometheus_client = pytest.importorskip("prometheus_client")
parser = importlib.import_module("prometheus_client.parser")
observe: Any = importlib.import_module("aiocuda.observe")

#: The value of each sample, by its name and labels.
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """The samples of an exposition. Each metric and each sample is there once, with a HELP text."""
    families = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def value(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[f"aiocuda_{name}", frozenset(labels.items())]


def scrape(*devices: Device, **sources: Any) -> Samples:
    registry = prometheus_client.CollectorRegistry()
    registry.register(observe.PrometheusCollector(*devices, sources=sources or None))
    return parsed(prometheus_client.generate_latest(registry).decode())


@contextlib.contextmanager
def served(collector: Any) -> Iterator[str]:
    """Serve a collector over HTTP from a thread; the URL."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return parsed(answer.read().decode())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape waits long for a loop that other programs delay."""
    monkeypatch.setattr("aiocuda.observe._prometheus.LOOP_TIMEOUT", PATIENCE)


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    """A device of the host driver: GPU tests need no packages beside those that aiocuda requires."""
    async with aiocuda.open_device(driver="host") as opened:
        yield opened


async def echo(batch: Batch[int]) -> list[int]:
    return batch.items


@pytest.mark.asyncio
async def test_http_scrape_has_the_figures_of_the_work(device: Device) -> None:
    async with device.stream(name="left") as stream, MicroBatcher(echo, max_batch_size=8) as batcher:
        buffer = await stream.upload(np.zeros(1000, np.uint32))
        for _ in range(7):
            stream.launch(AFFINE, 4, 256, buffer, 1000, 3, 1)
        await stream.synchronize()
        await asyncio.gather(*(batcher.submit(number) for number in range(3)))
        collector = observe.PrometheusCollector(device, sources={"model": batcher, "left": stream})
        with served(collector) as url:
            samples = await asyncio.to_thread(get, url)
            on, model, left = {"device": "0"}, {"source": "model"}, {"source": "left"}
            figures = device.statistics()
            assert value(samples, "operations_submitted_total", **on) == figures.submitted
            assert value(samples, "operations_resolved_total", **on) == figures.resolved >= 9
            assert value(samples, "operations_in_flight", **on) == 0
            assert value(samples, "device_up", **on) == 1
            assert value(samples, "device_info", **on, name=device.name, driver="host") == 1
            assert value(samples, "memory_live_bytes", **on) == 4000
            assert value(samples, "memory_class_bytes", **on, size_class="4096") == 4000
            assert value(samples, "stream_launches_total", **left) == 7
            assert value(samples, "stream_uploaded_bytes_total", **left) == 4000
            assert value(samples, "stream_operation_seconds", **left, quantile="0.99") > 0
            assert value(samples, "batcher_requests_answered_total", **model) == 3
            assert value(samples, "batcher_queue_length", **model) == 0
            assert value(samples, "batcher_batch_size_bucket", **model, le="2.0") == 0
            assert value(samples, "batcher_batch_size_bucket", **model, le="4.0") == 1
            assert value(samples, "batcher_batch_size_bucket", **model, le="+Inf") == 1
            assert value(samples, "batcher_batch_size_count", **model) == 1
            assert value(samples, "batcher_batch_size_sum", **model) == 3
            assert value(samples, "source_up", **model) == value(samples, "source_up", **left) == 1
            assert value(samples, "event_loop_lag_seconds") >= 0
            assert value(samples, "gc_collections_total", generation="2") == COLLECTIONS.counts[2]
            assert value(samples, "gc_seconds_total", generation="2") == pytest.approx(COLLECTIONS.seconds[2])
            for _ in range(5):
                stream.launch(AFFINE, 4, 256, buffer, 1000, 3, 1)
            await stream.synchronize()
            again = await asyncio.to_thread(get, url)
            assert value(again, "stream_launches_total", **left) == 12
            assert value(again, "operations_submitted_total", **on) == figures.submitted + 6


@pytest.mark.asyncio
async def test_queue_length_of_a_batcher(device: Device) -> None:
    ready = asyncio.Event()

    async def hold(batch: Batch[int]) -> list[int]:
        await ready.wait()
        return batch.items

    async with MicroBatcher(hold, max_batch_size=1, device=device) as batcher:
        requests = [asyncio.ensure_future(batcher.submit(number)) for number in range(5)]
        await until(lambda: batcher.statistics().queued == 4)
        assert value(scrape(device, model=batcher), "batcher_queue_length", source="model") == 4
        assert value(scrape(model=batcher), "batcher_requests_running", source="model") == 1
        ready.set()
        await quickly(asyncio.gather(*requests))
        assert value(scrape(model=batcher), "batcher_queue_length", source="model") == 0


@pytest.mark.asyncio
async def test_all_kinds_of_sources(device: Device) -> None:
    resources: list[StatisticsResource] = []

    def counted(upstream: Any) -> StatisticsResource:
        resources.append(StatisticsResource(upstream))
        return resources[0]

    device.memory.use(counted)
    pipeline = Pipeline(device, [Stage("increase", lambda slot: slot.stream.fill(slot.buffer("x", 4, np.float32), 1))])
    async with (
        DataLoader(device, [{"x": np.zeros(2, np.float32)}] * 6, batch_size=2) as loader,
        StreamPool(device) as pool,
        AsyncCoordinator(device) as coordinator,
    ):
        async for _ in loader:
            pass
        async for _ in pipeline.run(range(3)):
            pass
        async with pool.stream() as stream:
            await stream.synchronize()
        await coordinator.upload(np.zeros(4, np.uint32))
        await coordinator.host(lambda: None)
        events = EventPool(device, limit=4)
        event = events.acquire_nowait()
        await until(lambda: pool.statistics().workloads)
        samples = scrape(
            device, loader=loader, pipeline=pipeline, pool=pool, coordinator=coordinator, events=events,
            memory=resources[0],
        )  # fmt: skip
        event.release()
    assert value(samples, "loader_batches_total", source="loader") == 3
    assert value(samples, "loader_uploaded_bytes_total", source="loader") == 48
    assert value(samples, "pipeline_items_total", source="pipeline") == 3
    assert value(samples, "pipeline_stage_busy_seconds", source="pipeline", stage="increase") >= 0
    assert value(samples, "stream_pool_leases_granted_total", source="pool") == 1
    workload = value(samples, "stream_pool_workload_leases_total", source="pool", workload="coordination")
    assert workload == 1
    assert value(samples, "coordinator_operations_total", source="coordinator", kind="transfer") == 1
    assert value(samples, "coordinator_operations_total", source="coordinator", kind="host") == 1
    assert value(samples, "event_pool_events_lent", source="events") == 1
    assert value(samples, "resource_allocations_total", source="memory") > 0


def statistics_classes() -> dict[str, type]:
    """All classes whose name ends like that of statistics, by name."""
    found = {}
    for module in pkgutil.walk_packages(aiocuda.__path__, "aiocuda."):
        if any(part in module.name for part in ("__main__", ".integrations", ".cli", "_dask", "_worker_main")):
            continue
        if module.name.endswith(("_hatch_hook", "_replica_main", "_nvtx", "_opentelemetry")):
            continue
        for thing in vars(importlib.import_module(module.name)).values():
            if isinstance(thing, type) and thing.__module__.startswith("aiocuda"):
                if thing.__name__.endswith(("Statistics", "Stats")):
                    found[thing.__name__] = thing
    return found


@pytest.mark.slow
def test_every_figure_of_every_statistics_class_has_a_metric_or_is_excluded() -> None:
    classes = statistics_classes()
    assert classes.pop("ContextStatistics")  # it has only those of others
    assert set(classes) == set(TABLES)
    for name, statistics in classes.items():
        if dataclasses.is_dataclass(statistics):
            fields = {field.name for field in dataclasses.fields(statistics)}
        else:
            fields = set(statistics._fields)  # type: ignore[attr-defined]
        exported = {metric.field for metric in TABLES[name]} | set(NESTED.get(name, ()))
        excluded = set(EXCLUDED.get(name, ()))
        assert not exported & excluded, name
        assert exported | excluded == fields | ({"running"} if name == "ReplicaStatistics" else set()), name


def test_metrics_have_the_names_that_prometheus_recommends() -> None:
    labels: dict[str, tuple[str, tuple[str, ...], str]] = {}
    for name, table in TABLES.items():
        for metric in table:
            assert metric.name.startswith("aiocuda_")
            assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
            assert not metric.name.removesuffix("_total").endswith(("_ms", "_us", "_count", "_sum", "_bucket"))
            assert ("seconds" in metric.name) == (metric.field.endswith(("_ms", "_s", "seconds", "overhead"))) or (
                "per_second" in metric.name
            ), metric.name
            assert metric.text.endswith("."), metric.name
            same = labels.setdefault(metric.name, (name, metric.labels(), metric.text))
            assert same == (name, metric.labels(), metric.text)


@pytest.mark.asyncio
async def test_registering_reads_no_statistics_and_a_second_collector_is_refused(device: Device) -> None:
    read: list[int] = []

    class Counted:
        def statistics(self) -> Any:
            read.append(1)
            return device.memory.statistics()

    collector = observe.PrometheusCollector(device, sources={"counted": Counted()})
    before = len(read)
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    assert len(read) == before
    prometheus_client.generate_latest(registry)
    assert len(read) == before + 1
    with pytest.raises(ValueError, match="aiocuda_operations_submitted"):
        registry.register(observe.PrometheusCollector(device))
    registry.unregister(collector)
    registry.register(observe.PrometheusCollector(device))


@pytest.mark.asyncio
async def test_several_devices_in_one_collector() -> None:
    driver = HostDriver(devices=2)
    async with aiocuda.open_device(0, driver=driver) as first, aiocuda.open_device(1, driver=driver) as second:
        async with second.stream() as stream:
            await stream.synchronize()
        samples = scrape(first, second)
        assert value(samples, "operations_submitted_total", device="0") == 0
        assert value(samples, "operations_submitted_total", device="1") == 1
        with pytest.raises(InvalidArgumentError, match="two devices have the index 0"):
            observe.PrometheusCollector(first, first)


@pytest.mark.asyncio
async def test_closed_device_is_down_and_has_no_other_metrics() -> None:
    async with aiocuda.open_device(driver="host") as device:
        async with MicroBatcher(echo, max_batch_size=8, device=device) as batcher:
            collector = observe.PrometheusCollector(device, sources={"model": batcher})
        await device.aclose()
    names = {family.name: family.samples[0].value for family in collector.collect() if family.name != "x"}
    assert names["aiocuda_device_up"] == 0
    assert "aiocuda_operations_submitted" not in names
    assert names["aiocuda_source_up"] == 1


@pytest.mark.asyncio
async def test_faulted_device_is_down_and_keeps_its_counts() -> None:
    async with aiocuda.open_device(driver=HostDriver()) as device:
        stream = device.stream()
        with pytest.raises(DeviceFault):
            await stream.launch(TRAP, 1, 1)
        samples = await asyncio.to_thread(scrape, device)
    assert value(samples, "device_up", device="0") == 0
    assert value(samples, "operations_failed_total", device="0") == 1


FORKED = """
import asyncio, os, warnings
import aiocuda
from aiocuda.observe import PrometheusCollector
from aiocuda.serving import MicroBatcher

async def echo(batch):
    return batch.items

async def main():
    async with aiocuda.open_device(driver="host") as device, MicroBatcher(echo, max_batch_size=8) as batcher:
        collector = PrometheusCollector(device, sources={"model": batcher})
        if not (child := os.fork()):
            print({family.name: family.samples[0].value for family in collector.collect()}, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

warnings.filterwarnings("ignore", category=DeprecationWarning)  # of a fork beside threads
asyncio.run(main())
"""


@pytest.mark.slow
def test_forked_process_has_only_the_information_that_the_device_is_down() -> None:
    finished = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    assert ast.literal_eval(finished.stdout) == {"aiocuda_device_info": 1, "aiocuda_device_up": 0}


@pytest.mark.asyncio
async def test_blocked_event_loop_delays_a_scrape_but_does_not_stop_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiocuda.observe._prometheus.LOOP_TIMEOUT", 0.05)
    async with MicroBatcher(echo, max_batch_size=8) as batcher:
        collector = observe.PrometheusCollector(device, sources={"model": batcher})
        with served(collector) as url:
            found: list[Samples] = []
            thread = threading.Thread(target=lambda: found.append(get(url)))
            thread.start()
            thread.join(PATIENCE)  # the loop is blocked
            assert not thread.is_alive()
            (samples,) = found
            assert value(samples, "event_loop_lag_seconds") == 0.05
            assert value(samples, "source_up", source="model") == 0
            assert value(samples, "device_up", device="0") == 1
            assert not any("batcher" in name for name, _ in samples)
            monkeypatch.setattr("aiocuda.observe._prometheus.LOOP_TIMEOUT", PATIENCE)
            after = await asyncio.to_thread(get, url)
            assert value(after, "source_up", source="model") == 1


@pytest.mark.asyncio
async def test_scrape_on_the_loop_itself_has_no_lag(device: Device) -> None:
    async with MicroBatcher(echo, max_batch_size=8) as batcher:
        samples = scrape(device, model=batcher)
    assert value(samples, "source_up", source="model") == 1
    assert not any("lag" in name for name, _ in samples)


@pytest.mark.asyncio
async def test_source_that_cannot_be_read_is_down(device: Device) -> None:
    async with StreamPool(device) as pool:

        class Failing:
            error: Exception | None = None

            def statistics(self) -> Any:
                if self.error is not None:
                    raise self.error
                return pool.statistics()

        failing = Failing()
        collector = observe.PrometheusCollector(device, sources={"failing": failing, "pool": pool})
        registry = prometheus_client.CollectorRegistry()
        registry.register(collector)
        failing.error = aiocuda.ClosedError("closed")
        samples = parsed(prometheus_client.generate_latest(registry).decode())
        assert value(samples, "source_up", source="failing") == 0
        assert value(samples, "source_up", source="pool") == 1
        failing.error = ZeroDivisionError()  # an error of the program
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(prometheus_client.generate_latest, registry)


@pytest.mark.asyncio
async def test_labels_with_any_characters(device: Device) -> None:
    name = 'quote " slash \\ line\nend \udc80'
    async with MicroBatcher(echo, max_batch_size=8) as batcher:
        samples = scrape(device, **{name: batcher})
    assert value(samples, "batcher_queue_length", source=name.replace("\udc80", "\\udc80")) == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_scrapes_of_threads_while_the_loop_works(device: Device) -> None:
    async with (
        device.stream() as stream,
        MicroBatcher(echo, max_batch_size=4, batch_wait_timeout_s=0) as batcher,
        AsyncCoordinator(device) as coordinator,
    ):
        collector = observe.PrometheusCollector(device, sources={"model": batcher, "coordinator": coordinator})
        done = threading.Event()

        def look() -> int:
            scrapes = 0
            while not done.is_set():
                assert any(family.name == "aiocuda_memory_live_bytes" for family in collector.collect())
                scrapes += 1
            return scrapes

        looking = [asyncio.create_task(asyncio.to_thread(look)) for _ in range(2)]
        for _ in range(100):
            buffers = [stream.empty(1 << size, np.uint32) for size in range(10)]
            await asyncio.gather(*(batcher.submit(number) for number in range(8)))
            coordinator.upload(np.zeros(8, np.uint32))
            await stream.launch(AFFINE, 1, 1, buffers[9], 1, 3, 1)
        done.set()
        assert min(await quickly(asyncio.gather(*looking))) > 5


@pytest.mark.asyncio
async def test_wrong_arguments(device: Device, stream: Stream) -> None:
    for wrong in (7, None, stream, "host", Device):
        with pytest.raises(InvalidTypeError, match=r"PrometheusCollector takes aiocuda\.Device objects, not"):
            observe.PrometheusCollector(wrong)
    with pytest.raises(InvalidArgumentError, match="needs a device"):
        observe.PrometheusCollector()
    for sources, error, text in (
        ([stream], InvalidTypeError, "sources maps names to objects"),
        ({7: stream}, InvalidTypeError, "the name of a source is a str, not 7"),
        ({"": stream}, InvalidArgumentError, "must not be empty"),
        ({"x": 7}, InvalidTypeError, r"the source 'x' has no statistics\(\), and is 7"),
        ({"x": Stream}, InvalidTypeError, r"the source 'x' has no statistics\(\)"),
        ({"x": device}, InvalidTypeError, "a device is no source"),
        ({"x": device.driver}, InvalidTypeError, "of the type dict, which has no metrics"),
    ):
        with pytest.raises(error, match=text):
            observe.PrometheusCollector(device, sources=sources)
    with pytest.raises(NoEventLoopError, match="sources are read by their event loop"):
        await asyncio.to_thread(observe.PrometheusCollector, device, sources={"left": stream})
