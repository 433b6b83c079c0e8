"""Drivers that break one rule each, and the conformance suite over them. Run by `test_conformance`, not collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import pytest

from aiocuda._base._types import Dim3
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Advice, Driver, Node, RecordedCall, record_after
from aiocuda.driver.software._model import COMPUTE_SLOTS
from aiocuda.testing.conformance import DriverConformance, PeerConformance


class Faithful:
    """Hands every verb on to a host driver. Breaks nothing: what fails below fails for the rule that is broken."""

    devices: ClassVar[int] = 1

    def __init__(self) -> None:
        self._host = HostDriver(devices=self.devices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def recorder(self, stream: int) -> Callable[[int], None]:
        return lambda event: self.event_record(event, stream)

    def recorded_launch(self, stream: int, *bound: Any) -> RecordedCall:
        return record_after(self.launcher(stream, *bound), self.recorder(stream))

    def recorded_upload(self, stream: int, *ends: int) -> RecordedCall:
        return record_after(lambda _: self.upload(stream, *ends), self.recorder(stream))

    def recorded_download(self, stream: int, *ends: int) -> RecordedCall:
        return record_after(lambda _: self.download(stream, *ends), self.recorder(stream))

    def recorded_wait(self, stream: int) -> RecordedCall:
        return record_after(lambda events: [self.stream_wait(stream, each) for each in events], self.recorder(stream))

    def waiter(self, streams: Sequence[int]) -> Callable[[int], None]:
        def wait(event: int) -> None:
            for stream in streams:
                self.stream_wait(stream, event)

        return wait


class RunsAtEnqueue(Faithful):
    """Whatever is enqueued has run when the call returns."""

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._host, name)
        if name not in ("upload", "download", "copy", "fill", "prefetch", "graph_launch"):
            return verb

        def run(stream: int, *arguments: Any) -> None:
            verb(stream, *arguments)
            self._host.stream_synchronize(stream)

        return run

    def launcher(
        self, stream: int, function: int, grid: Dim3, block: Dim3, shared_bytes: int
    ) -> Callable[[Sequence[Any]], None]:
        enqueue = self._host.launcher(stream, function, grid, block, shared_bytes)

        def run(values: Sequence[Any]) -> None:
            enqueue(values)
            self._host.stream_synchronize(stream)

        return run


_ON_A_STREAM = {
    *("upload", "download", "copy", "fill", "prefetch", "launcher", "graph_launch"),
    *("stream_wait", "stream_query"),
}


class OneQueue(Faithful):
    """All streams are one."""

    def __init__(self) -> None:
        super().__init__()
        self._queue = self._host.stream_create(0, 0)

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._host, name)
        if name not in _ON_A_STREAM:
            return verb

        def run(stream: int, *arguments: Any) -> Any:
            self._host.stream_query(stream)  # a destroyed stream is as stale as ever
            return verb(self._queue, *arguments)

        return run

    def event_record(self, event: int, stream: int) -> None:
        self._host.stream_query(stream)
        self._host.event_record(event, self._queue)

    def allocate(self, device: int, nbytes: int, stream: int) -> int:
        return self._host.allocate(device, nbytes, self._queue)

    def deallocate(self, address: int, stream: int) -> None:
        self._host.deallocate(address, self._queue)


class EventsAlwaysDone(Faithful):
    """Every event is recorded where nothing was ever enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self._nothing = self._host.stream_create(0, 0)

    def event_record(self, event: int, stream: int) -> None:
        self._host.stream_query(stream)
        self._host.event_record(event, self._nothing)


class IgnoresPriority(Faithful):
    """Returns a stream's priority, but does not apply it."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[int, int] = {}

    def stream_create(self, device: int, priority: int) -> int:
        stream = self._host.stream_create(device, 0)
        least, greatest = self._host.priority_range(device)
        self._asked[stream] = max(greatest, min(least, priority))
        return stream

    def stream_priority(self, stream: int) -> int:
        self._host.stream_query(stream)
        return self._asked[stream]


class DestroysEveryStream(Faithful):
    """Destroys streams that other libraries may use."""

    def stream_handle(self, stream: int) -> int:
        self._host.stream_query(stream)
        return stream


class ServesBusyStreams(Faithful):
    """Gives an exported stream to the next owner, whatever it still does."""

    def __init__(self) -> None:
        super().__init__()
        self._exported: set[int] = set()
        self._kept: list[int] = []

    def stream_handle(self, stream: int) -> int:
        self._exported.add(stream)
        return stream

    def stream_create(self, device: int, priority: int) -> int:
        return self._kept.pop() if self._kept else self._host.stream_create(device, priority)

    def stream_destroy(self, stream: int) -> None:
        if stream in self._exported:
            self._kept.append(stream)
        else:
            self._host.stream_destroy(stream)


class ForgetsEdges(Faithful):
    """The nodes of a graph wait for nothing."""

    def graph_build(self, device: int, nodes: Sequence[Node]) -> int:
        return self._host.graph_build(device, [dataclasses.replace(node, after=()) for node in nodes])


class UpdatesLate(Faithful):
    """An update reaches the launch after the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[int, int, Node]] = []

    def graph_update(self, graph: int, index: int, node: Node) -> None:
        self._late.append((graph, index, node))

    def graph_launch(self, stream: int, graph: int) -> None:
        self._host.graph_launch(stream, graph)
        for update in self._late:
            self._host.graph_update(*update)


class FaithfulToPeers(Faithful):
    """Breaks nothing on two devices."""

    devices = 2


class ForgetsOtherDevices(FaithfulToPeers):
    """Streams of one device wait for no event of another, and managed memory never moves to device 1."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, int] = {}  # of streams and events

    def stream_create(self, device: int, priority: int) -> int:
        stream = self._host.stream_create(device, priority)
        self._places[stream] = device
        return stream

    def event_create(self, device: int, timing: bool = False) -> int:
        event = self._host.event_create(device, timing)
        self._places[event] = device
        return event

    def stream_wait(self, stream: int, event: int) -> None:
        if self._places[stream] == self._places[event]:
            self._host.stream_wait(stream, event)

    def prefetch(self, stream: int, address: int, nbytes: int, place: int) -> None:
        self._host.prefetch(stream, address, nbytes, min(place, 0))

    def advise(self, address: int, nbytes: int, advice: Advice, place: int) -> None:
        self._host.advise(address, nbytes, advice, min(place, 0))


class Made:
    """Makes the driver of a test."""

    patience: ClassVar[float] = 0.5  # a failing test waits so long
    make: ClassVar[type[Faithful]]

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = cast("Driver", self.make())
        yield driver
        driver.close()


class Broken(Made, DriverConformance):
    full_house: ClassVar[int] = COMPUTE_SLOTS


class BrokenPeers(Made, PeerConformance):
    pass


class TestFaithful(Broken):
    make = Faithful


class TestRunsAtEnqueue(Broken):
    make = RunsAtEnqueue


class TestOneQueue(Broken):
    make = OneQueue


class TestEventsAlwaysDone(Broken):
    make = EventsAlwaysDone


class TestDestroysEveryStream(Broken):
    make = DestroysEveryStream


class TestServesBusyStreams(Broken):
    make = ServesBusyStreams


class TestForgetsEdges(Broken):
    make = ForgetsEdges


class TestUpdatesLate(Broken):
    make = UpdatesLate


class TestIgnoresPriority(Broken):
    make = IgnoresPriority


class TestFaithfulToPeers(BrokenPeers):
    make = FaithfulToPeers


class TestForgetsOtherDevices(BrokenPeers):
    make = ForgetsOtherDevices
