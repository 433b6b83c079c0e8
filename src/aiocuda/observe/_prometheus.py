"""PrometheusCollector: the statistics of devices, batchers, loaders and others as metrics for Prometheus."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from .._base._collections import COLLECTIONS
from ..device import Device
from ..errors import AiocudaError, InvalidArgumentError, InvalidTypeError, NoEventLoopError
from ._metrics import NESTED, TABLES, Metric, Reading, readings

__all__ = ["PrometheusCollector", "Source"]

#: Seconds that a scrape waits for the event loop of the sources.
LOOP_TIMEOUT = 1.0

#: Upper bounds of the histogram of batch sizes. The last one is infinity.
SIZES = tuple(1 << power for power in range(11))

Families: TypeAlias = dict[str, Family]

T = TypeVar("T")

_USE = "use a batcher, loader, pipeline, coordinator, pool, stream or cluster"

UP = Metric("", "aiocuda_device_up", "gauge", "1 while the device can be used; 0 after a fault, and once it is closed.")
INFO = Metric("", "aiocuda_device_info", "gauge", "The name and the driver of the device. The value is always 1.")
SOURCE_UP = Metric("", "aiocuda_source_up", "gauge", "1 if the statistics of the source could be read, otherwise 0.")
LAG = Metric(
    "",
    "aiocuda_event_loop_lag_seconds",
    "gauge",
    "Time that the event loop took to call a function for this scrape; 1 if it took that long or longer.",
)
COLLECTED = Metric(
    "", "aiocuda_gc_collections", "counter", "Garbage collections of Python while a device was open, by generation."
)
COLLECTING = Metric("", "aiocuda_gc_seconds", "counter", "Time that they took. Meanwhile no event loop does anything.")


class Source(Protocol):
    """An object of aiocuda with statistics: a batcher, loader, pipeline, coordinator, pool, stream or cluster."""

    def statistics(self) -> Any:
        """Return the statistics."""


class PrometheusCollector(Collector):
    """A collector of `prometheus_client` for devices, and for other objects that have statistics.

    ::

        from prometheus_client import REGISTRY, start_http_server

        collector = PrometheusCollector(device, sources={"model": batcher, "images": loader})
        REGISTRY.register(collector)
        start_http_server(9100)

    It reads the statistics when Prometheus scrapes them; between scrapes it costs nothing. A scrape may run in any
    thread, as that of `prometheus_client.start_http_server`. The statistics of devices are read in that thread, also
    while the event loop is blocked. Those of sources are read by the event loop in which the collector was made: a
    scrape waits for it for at most one second, and then has no metrics of sources. This wait is the metric
    ``aiocuda_event_loop_lag_seconds``, which a scrape on the loop itself does not have.

    After a fault of the device ``aiocuda_device_up`` is 0; after `Device.aclose`, and in a forked process, this is the
    only metric of the device. ``aiocuda_source_up`` is 0 for a source whose statistics cannot be read.

    A registry accepts one collector: pass all devices and all sources to it.

    Parameters
    ----------
    devices
        The devices. The label ``device`` is `Device.index`.
    sources
        By name, objects with statistics: `MicroBatcher`, `DataLoader`, `Pipeline`, `AsyncCoordinator`, `StreamPool`,
        `EventPool`, `Stream`, `Cluster`, `aiocuda.memory.StatisticsResource`. The label ``source`` is the name. All
        belong to the running event loop.

    Raises
    ------
    InvalidArgumentError
        There is neither a device nor a source; two devices have the same index; a name is empty.
    InvalidTypeError
        A device or a source cannot be used.
    NoEventLoopError
        There are sources, and no event loop runs.
    """

    def __init__(self, *devices: Device, sources: Mapping[str, Source] | None = None) -> None:
        self._devices = _checked_devices(devices)
        self._sources = _checked_sources(sources)
        if not self._devices and not self._sources:
            raise InvalidArgumentError("PrometheusCollector needs a device: PrometheusCollector(device)")
        self._loop = asyncio._get_running_loop()
        if self._sources and self._loop is None:
            raise NoEventLoopError("sources are read by their event loop: make the PrometheusCollector inside of it")
        self._process = os.getpid()
        # Their types are known from here on; an object without statistics of aiocuda is found now, not by a scrape.
        self._tables = {name: _table(name, source.statistics()) for name, source in self._sources.items()}

    def describe(self) -> Iterable[Family]:
        """Return all metrics without samples: to register the collector reads no statistics."""
        return self._families().values()

    def collect(self) -> Iterator[Family]:
        """Yield the metrics with their present values."""
        families = self._families()
        for device in self._devices:
            self._read_device(families, device)
        if any(not device.closed for device in self._devices) and os.getpid() == self._process:
            for generation, (count, seconds) in enumerate(zip(COLLECTIONS.counts, COLLECTIONS.seconds, strict=True)):
                _add(families, (COLLECTED, {"generation": str(generation)}, count))
                _add(families, (COLLECTING, {"generation": str(generation)}, seconds))
        if self._sources and os.getpid() == self._process:
            self._read_sources(families)
        yield from (family for family in families.values() if family.samples)

    # -- devices -------------------------------------------------------------------------------------------------

    def _read_device(self, families: Families, device: Device) -> None:
        labels = {"device": str(device.index)}
        is_open = os.getpid() == self._process and not device.closed
        if is_open:
            try:
                found = [*readings(device.statistics(), labels), *readings(device.memory.statistics(), labels)]
            except AiocudaError:  # it was closed, or has faulted, since the line above
                is_open = not device.closed
            else:
                for reading in found:
                    _add(families, reading)
        info = {**labels, "name": device.name, "driver": device.driver.name}
        _add(families, (INFO, info, 1))
        _add(families, (UP, labels, int(is_open and device.fault is None)))

    # -- sources -------------------------------------------------------------------------------------------------

    def _read_sources(self, families: Families) -> None:
        assert self._loop is not None
        try:
            found, lag = call_on_loop(self._loop, self._source_readings, LOOP_TIMEOUT)
        except TimeoutError:
            found, lag = [(SOURCE_UP, {"source": name}, 0) for name in self._sources], LOOP_TIMEOUT
        for reading in found:
            _add(families, reading)
        if lag is not None:
            _add(families, (LAG, {}, lag))

    def _source_readings(self) -> list[Reading]:
        found: list[Reading] = []
        for name, source in self._sources.items():
            labels = {"source": name}
            try:
                found += readings(source.statistics(), labels)
            except AiocudaError:  # for example, it belongs to a device that was closed
                found.append((SOURCE_UP, labels, 0))
            else:
                found.append((SOURCE_UP, labels, 1))
        return found

    # -- families ------------------------------------------------------------------------------------------------

    def _families(self) -> Families:
        """Return all metrics by name, without samples."""
        families: Families = {}
        if self._devices:
            _describe(families, INFO, ("device", "name", "driver"))
            _describe(families, UP, ("device",))
            _describe(families, COLLECTED, ("generation",))
            _describe(families, COLLECTING, ("generation",))
            for table in ("DeviceStatistics", "MemoryStatistics"):
                _describe_table(families, table, ("device",))
        if self._sources:
            _describe(families, SOURCE_UP, ("source",))
            _describe(families, LAG, ())
            for table in self._tables.values():
                _describe_table(families, table, ("source",))
        return families


def _checked_devices(devices: tuple[Any, ...]) -> tuple[Device, ...]:
    indices: set[int] = set()
    for device in devices:
        if not isinstance(device, Device):
            raise InvalidTypeError(
                f"PrometheusCollector takes aiocuda.Device objects, not {type(device).__name__}: use "
                "PrometheusCollector(device, sources={'name': source}) for other objects"
            )
        if device.index in indices:
            raise InvalidArgumentError(
                f"two devices have the index {device.index}, which is their label: use one collector and one registry "
                "for each"
            )
        indices.add(device.index)
    return devices


def _checked_sources(sources: Any) -> dict[str, Source]:
    if sources is None:
        return {}
    if not isinstance(sources, Mapping):
        raise InvalidTypeError(f"sources maps names to objects, as in {{'model': batcher}}, and is not {sources!r}")
    for name, source in sources.items():
        if not isinstance(name, str):
            raise InvalidTypeError(f"the name of a source is a str, not {name!r}")
        if not name:
            raise InvalidArgumentError("the name of a source must not be empty: it is a label of its metrics")
        if isinstance(source, Device):
            raise InvalidTypeError(f"a device is no source: use PrometheusCollector(device), without {name!r}")
        if isinstance(source, type) or not callable(getattr(source, "statistics", None)):
            raise InvalidTypeError(f"the source {name!r} has no statistics(), and is {source!r}: {_USE}")
    return dict(sources)


def _table(name: str, statistics: object) -> str:
    """Return the name of the table for the statistics of a source."""
    found = type(statistics).__name__
    if found not in TABLES or not type(statistics).__module__.startswith("aiocuda"):
        raise InvalidTypeError(
            f"the statistics of the source {name!r} are of the type {found}, which has no metrics: {_USE}"
        )
    return found


def _describe_table(families: Families, name: str, labels: tuple[str, ...]) -> None:
    for metric in TABLES[name]:
        _describe(families, metric, (*labels, *metric.labels()))
    for nested, label, _ in NESTED.get(name, {}).values():
        _describe_table(families, nested, (*labels, label))


def _describe(families: Families, metric: Metric, labels: tuple[str, ...]) -> None:
    classes = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    families.setdefault(metric.name, classes[metric.kind](metric.name, metric.text, labels=labels))


def _add(families: Families, reading: Reading) -> None:
    metric, labels, value = reading
    family: Any = families[metric.name]
    # A text that is no valid Unicode cannot be sent.
    texts = [text.encode("utf-8", "backslashreplace").decode() for text in labels.values()]
    if metric.kind == "histogram":
        family.add_metric(texts, _buckets(value), sum(size * count for size, count in value.items()))
    else:
        family.add_metric(texts, value)


def _buckets(counts: Mapping[int, int]) -> list[tuple[str, float]]:
    """Return the cumulative counts of a histogram."""
    bounds = [(f"{bound}.0", sum(count for size, count in counts.items() if size <= bound)) for bound in SIZES]
    return [*bounds, ("+Inf", sum(counts.values()))]


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T], timeout: float) -> tuple[T, float | None]:
    """Call a function on a loop, and return its result and the seconds until the loop has begun it.

    On the loop itself, and while the loop does not run, the function is called here; the seconds are None then.

    Raises
    ------
    TimeoutError
        The loop has not called the function within the time. It will not call it later.
    Exception
        The exception of the function.
    """
    if asyncio._get_running_loop() is loop or not loop.is_running():
        return function(), None
    answer: concurrent.futures.Future[tuple[T, float]] = concurrent.futures.Future()
    began = time.monotonic()

    def answer_here() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        lag = time.monotonic() - began
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer.set_exception(error)
        except BaseException:  # Ctrl-C leaves the loop
            answer.set_exception(TimeoutError("the event loop was interrupted"))
            raise
        else:
            answer.set_result((result, lag))

    try:
        loop.call_soon_threadsafe(answer_here)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return function(), None
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:
        answer.cancel()
        raise
