from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aiocuda._base._types import Span
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import CudaSource, Driver, EmptyNode, Program
from aiocuda.driver.software import Core
from aiocuda.errors import ClosedError, DeviceFault, ForkedProcessError
from tests.driver.host.kit import PATIENCE, Gate, Mailbox, Rig, address_of

ONE = (1, 1, 1)


_before: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def threads_before() -> None:
    """Note the threads of drivers that tests of other files have left: `conftest.py` freezes these drivers."""
    _before[:] = threading.enumerate()


def threads() -> list[threading.Thread]:
    """Return the threads of the drivers of this test."""
    found = [thread for thread in threading.enumerate() if thread.name.startswith("aiocuda-host")]
    return [thread for thread in found if thread not in _before]


def join(ending: list[threading.Thread]) -> None:
    for thread in ending:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} does not end"


class Handles:
    """One of everything, so that every verb can be called."""

    def __init__(self, rig: Rig) -> None:
        self.driver = rig.driver
        self.mailbox = Mailbox()
        self.streams = [rig.stream(), rig.stream()]
        self.events = [rig.event(timing=True), rig.event()]
        self.host = address_of(rig.pinned([0] * 64))
        self.pinned = rig.driver.pinned_allocate(64)
        self.own = bytearray(64)
        self.managed = [rig.driver.managed_allocate(0, 64) for _ in range(2)]
        self.memory = [rig.driver.allocate(0, 64, self.streams[0]) for _ in range(2)]
        self.function = rig.driver.load(0, Program("nothing", "", host=lambda: None))
        self.launch = rig.driver.launcher(self.streams[0], self.function, ONE, ONE, 0)
        self.notifier = rig.driver.notifier(0, self.mailbox.port)
        self.graphs = [rig.driver.graph_build(0, [EmptyNode()]) for _ in range(2)]

    def using(self) -> dict[str, Callable[[], object]]:
        """Verbs that need the device."""
        driver, stream, event = self.driver, self.streams[0], self.events[0]
        return {
            "device_count": driver.device_count,
            "device_open": lambda: driver.device_open(0),
            "priority_range": lambda: driver.priority_range(0),
            "stream_create": lambda: driver.stream_create(0, 0),
            "stream_default": lambda: driver.stream_default(0),
            "stream_import": lambda: driver.stream_import(0, stream),
            "stream_handle": lambda: driver.stream_handle(stream),
            "stream_has_handle": lambda: driver.stream_has_handle(stream, stream),
            "stream_priority": lambda: driver.stream_priority(stream),
            "stream_query": lambda: driver.stream_query(stream),
            "stream_synchronize": lambda: driver.stream_synchronize(stream),
            "stream_wait": lambda: driver.stream_wait(stream, event),
            "waiter": lambda: driver.waiter((stream,))(event),
            "recorded_wait": lambda: driver.recorded_wait(stream)((event,), event),
            "stream_capturing": lambda: driver.stream_capturing(stream),
            "event_create": lambda: driver.event_create(0, False),
            "event_record": lambda: driver.event_record(event, stream),
            "recorder": lambda: driver.recorder(stream)(event),
            "event_query": lambda: driver.event_query(event),
            "event_elapsed_ms": lambda: driver.event_elapsed_ms(event, event),
            "memory_info": lambda: driver.memory_info(0),
            "allocate": lambda: driver.allocate(0, 64, stream),
            "pool_reserved": lambda: driver.pool_reserved(0),
            "pool_trim": lambda: driver.pool_trim(0, 0),
            "pinned_allocate": lambda: driver.pinned_allocate(64),
            "pin": lambda: driver.pin(4096, 64),
            "managed_allocate": lambda: driver.managed_allocate(0, 64),
            "upload": lambda: driver.upload(stream, self.memory[0], self.host, 64),
            "download": lambda: driver.download(stream, self.host, self.memory[0], 64),
            "copy": lambda: driver.copy(stream, self.memory[0], self.memory[1], 64),
            "copy_peer": lambda: driver.copy_peer(stream, self.memory[0], 0, self.memory[1], 0, 64),
            "fill": lambda: driver.fill(stream, self.memory[0], b"\0", 64),
            "prefetch": lambda: driver.prefetch(stream, self.managed[0], 64, 0),
            "locate": lambda: driver.locate(self.memory[0]),
            "advise": lambda: driver.advise(self.managed[0], 64, "set_read_mostly", 0),
            "managed_attributes": lambda: driver.managed_attributes(self.managed[0], 64),
            "compile": lambda: driver.compile(0, CudaSource("nothing", "")),
            "load": lambda: driver.load(0, Program("nothing", "", host=lambda: None)),
            "launcher": lambda: driver.launcher(stream, self.function, ONE, ONE, 0),
            "launch": lambda: self.launch(()),
            "recorded_launch": lambda: driver.recorded_launch(stream, self.function, ONE, ONE, 0)((), event),
            "recorded_upload": lambda: driver.recorded_upload(stream, self.memory[0], self.host, 64)((), event),
            "recorded_download": lambda: driver.recorded_download(stream, self.host, self.memory[0], 64)((), event),
            "graph_build": lambda: driver.graph_build(0, [EmptyNode()]),
            "graph_update": lambda: driver.graph_update(self.graphs[0], 0, EmptyNode()),
            "graph_launch": lambda: driver.graph_launch(stream, self.graphs[0]),
            "notifier": lambda: driver.notifier(0, self.mailbox.port),
            "ring": lambda: self.notifier.ring(event, 1),
        }

    def giving_back(self) -> dict[str, Callable[[], object]]:
        """Verbs that a fault does not stop."""
        driver = self.driver
        return {
            "stream_destroy": lambda: driver.stream_destroy(self.streams[1]),
            "event_destroy": lambda: driver.event_destroy(self.events[1]),
            "deallocate": lambda: driver.deallocate(self.memory[1], self.streams[0]),
            "pinned_deallocate": lambda: driver.pinned_deallocate(self.pinned),
            "managed_deallocate": lambda: driver.managed_deallocate(self.managed[1]),
            "graph_destroy": lambda: driver.graph_destroy(self.graphs[1]),
            "offload": lambda: driver.offload(lambda: None, self.mailbox.port, 1),
            "open_port": lambda: driver.open_port(lambda: None).close(),
            "worker_threads": lambda: driver.worker_threads(1, "thread", bool, self.mailbox.port, 1).close(),
        }

    def always(self) -> dict[str, Callable[[], object]]:
        """What reaches no device, and works to the end."""
        driver = self.driver
        return {
            "now": driver.now,
            "name": lambda: driver.name,
            "versions": driver.versions,
            "statistics": driver.statistics,
            "fault": lambda: driver.fault,
            "blame": lambda: driver.blame("an operation"),
            "polls_freely": lambda: driver.polls_freely,
            "stream_reserve": lambda: driver.stream_reserve(0, 64),
            "notifier_limit": lambda: driver.notifier_limit(0),
            "argument": lambda: driver.argument(Span(0, (0,), "|u1")),
            "wants_image": lambda: driver.wants_image,
            "begin_queries": driver.begin_queries,
            "end_queries": driver.end_queries,
            "close": driver.close,
        }


def test_every_method_of_the_protocol_is_called_below(rig: Rig) -> None:
    handles = Handles(rig)
    called = {*handles.using(), *handles.giving_back(), *handles.always()} - {"launch", "ring"} | {"registry", "unpin"}
    verbs = {name for kind in Driver.__mro__ for name in vars(kind) if not name.startswith("_")}
    assert called == verbs
    driver: Driver = rig.driver  # what mypy is to see: it is one
    assert driver.name == "host"


def broken() -> None:
    raise ZeroDivisionError("the twin's own mistake")


def fail(rig: Rig) -> None:
    stream = rig.stream()
    rig.launch(stream, broken)
    with pytest.raises(DeviceFault):
        rig.finish(stream)


def test_exception_in_a_host_implementation_is_a_fault_with_its_cause(rig: Rig) -> None:
    stream = rig.stream(1)
    rig.launch(stream, broken, device=1)
    with pytest.raises(DeviceFault, match="implementation of kernel 'broken' raised ZeroDivisionError") as caught:
        rig.finish(stream)
    fault = caught.value
    assert (fault.code, fault.device, fault.operation) == (719, 1, None)
    assert isinstance(fault.__cause__, ZeroDivisionError)
    trace = fault.__cause__.__traceback__
    assert trace is not None
    assert trace.tb_frame.f_code is broken.__code__


def test_after_a_fault_every_method_raises_an_equal_one_and_releasing_works(rig: Rig) -> None:
    handles = Handles(rig)
    fail(rig)
    rig.driver.blame("launch 1")
    latched = rig.driver.fault
    assert latched is not None
    for name, call in handles.using().items():
        with pytest.raises(DeviceFault, match=r"first seen by launch 1") as caught:
            call()
        assert caught.value is not latched, name
        assert caught.value.__dict__ == latched.__dict__
        assert caught.value.__cause__ is latched.__cause__
    for call in handles.giving_back().values():
        call()
    for name in set(handles.always()) - {"close"}:
        handles.always()[name]()
    assert handles.mailbox.wait(1) == [1]


def test_after_a_fault_nothing_completes_and_no_tag_arrives(rig: Rig) -> None:
    mailbox, held = Mailbox(), rig.stream()
    gate = rig.hold(held)
    log: list[str] = []
    rig.launch(held, lambda: log.append("behind"))
    rig.driver.notifier(0, mailbox.port).ring(rig.record(held), 1)
    runners = threads()
    fail(rig)
    gate.open()
    rig.driver.close()
    join(runners)  # they have come to the end of whatever they did
    assert log == []
    assert mailbox.look() == []


def test_fault_ends_synchronize(rig: Rig) -> None:
    held = rig.stream()
    gate = rig.hold(held)
    raised: list[BaseException] = []
    waiting = threading.Event()

    def synchronize() -> None:
        waiting.set()
        try:
            rig.driver.stream_synchronize(held)
        except DeviceFault as error:
            raised.append(error)

    thread = threading.Thread(target=synchronize)
    thread.start()
    waiting.wait(PATIENCE)
    fail(rig)
    thread.join(PATIENCE)
    assert [type(error) for error in raised] == [DeviceFault]
    gate.open()


def test_first_fault_stays_and_a_new_driver_opens(rig: Rig) -> None:
    first, second = rig.stream(), rig.stream()
    gate = Gate()

    def late() -> None:
        gate()
        raise ValueError("too late")

    rig.launch(second, late)
    gate.wait_running()
    rig.launch(first, broken)
    with pytest.raises(DeviceFault):
        rig.finish(first)
    runners = threads()
    gate.open()
    rig.driver.close()
    join(runners)
    assert rig.driver.fault is not None
    assert isinstance(rig.driver.fault.__cause__, ZeroDivisionError)
    other = Rig()
    stream = other.stream()
    assert other.download(stream, other.uploaded(stream, [1, 2, 3]), 3).tolist() == [1, 2, 3]
    other.driver.close()


def test_closed_driver_refuses_every_method(rig: Rig) -> None:
    handles = Handles(rig)
    rig.driver.close()
    for call in {**handles.using(), **handles.giving_back()}.values():
        with pytest.raises(ClosedError, match="host driver has been closed"):
            call()
    for call in handles.always().values():
        call()


def test_close_ends_threads_that_idle_and_those_that_sleep(rig: Rig) -> None:
    sleeping, idle = rig.stream(), rig.stream()
    rig.launch(sleeping, lambda: None, seconds=3600.0)
    rig.launch(idle, lambda: None)
    rig.finish(idle)
    runners = threads()
    assert len(runners) == rig.driver.statistics()["threads"] == 2
    assert all(thread.daemon for thread in runners)
    rig.driver.close()
    join(runners)
    assert rig.driver.statistics()["threads"] == 0


def test_transfer_that_close_interrupts_moves_nothing() -> None:
    rig = Rig(HostDriver(latency=3600.0))
    stream = rig.stream()
    source = rig.driver.allocate(0, 8, stream)
    rig.driver.fill(stream, source, b"\1", 8)
    rig.finish(stream)
    target = rig.pinned([0] * 8)
    rig.driver.download(stream, address_of(target), source, 8)
    runners = threads()
    rig.driver.close()
    join(runners)
    assert target.tolist() == [0] * 8


def test_close_ends_synchronize(rig: Rig) -> None:
    stream, mailbox = rig.stream(), Mailbox()
    gate = rig.hold(stream)
    raised: list[BaseException] = []

    def synchronize() -> None:
        try:
            rig.driver.stream_synchronize(stream)
        except ClosedError as error:
            raised.append(error)

    rig.driver.offload(synchronize, mailbox.port, 1)
    rig.driver.close()
    mailbox.wait(1)
    assert len(raised) == 1
    gate.open()


def test_threads_end_when_the_driver_is_collected() -> None:
    rig = Rig()
    streams = [rig.stream() for _ in range(3)]
    for gate in [rig.hold(stream) for stream in streams]:
        gate.open()
    rig.finish(*streams)
    runners = threads()
    assert len(runners) == 3
    gc.disable()  # no cycle holds it either
    try:
        del rig
        join(runners)
    finally:
        gc.enable()


def test_threads_are_as_many_as_run_at_once(rig: Rig) -> None:
    streams = [rig.stream() for _ in range(4)]
    for gate in [rig.hold(stream) for stream in streams]:
        gate.open()
    rig.finish(*streams)
    for _ in range(50):
        for stream in streams:
            rig.launch(stream, lambda: None)
        rig.finish(*streams)
    assert rig.driver.statistics()["threads"] == 4


def test_chain_of_kernels_stays_on_one_thread(rig: Rig) -> None:
    stream, other = rig.stream(), rig.stream()
    for gate in [rig.hold(stream), rig.hold(other)]:
        gate.open()
    rig.finish(stream, other)
    gate = rig.hold(stream)
    seen: set[int] = set()
    for _ in range(100):
        rig.launch(stream, lambda: seen.add(threading.get_ident()))
    gate.open()
    rig.finish(stream)
    assert len(seen) == 1


def test_no_thread_to_be_had_is_a_fault_and_no_hang(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = rig.stream()
    function = rig.driver.load(0, Program("nothing", "", host=lambda: None))
    launch = rig.driver.launcher(stream, function, ONE, ONE, 0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        launch(())
    with pytest.raises(DeviceFault, match="no thread for a kernel: can't start new thread"):
        rig.finish(stream)


def test_enqueueing_never_waits(rig: Rig) -> None:
    """Far more than a hardware queue takes, behind a held kernel."""
    stream = rig.stream()
    gate = rig.hold(stream)
    address = rig.driver.allocate(0, 8, stream)
    for _ in range(5_000):
        rig.driver.fill(stream, address, b"\1", 8)
    end = rig.record(stream)
    assert not rig.driver.event_query(end)
    gate.open()
    rig.finish(stream)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_is_refused_and_never_hangs(rig: Rig) -> None:
    handles = Handles(rig)
    stream = rig.stream()
    gate = rig.hold(stream)
    with rig.driver._lock:  # as if another thread held it in the instant of the fork
        child = os.fork()
        if child == 0:
            os._exit(_in_child(handles))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.open()
    rig.finish(stream)
    assert rig.driver.fault is None


def _in_child(handles: Handles) -> int:
    calls: dict[str, Any] = {**handles.using(), **handles.giving_back()}
    refused = 0
    for call in calls.values():
        try:
            call()
        except ForkedProcessError:
            refused += 1
    for call in handles.always().values():
        call()
    own = Rig()
    stream = own.stream()
    works = own.download(stream, own.uploaded(stream, [1, 2, 3]), 3).tolist() == [1, 2, 3]
    own.driver.close()
    del handles
    gc.collect()
    return 0 if works and refused == len(calls) else 1


def test_core_is_no_driver_by_itself() -> None:
    assert issubclass(HostDriver, Core)
    assert not hasattr(Core, "event_record")


def test_event_may_be_destroyed_during_another_method(rig: Rig) -> None:
    """The collector may run there, and finalise an `aiocuda.Event` that has outlived its device."""
    event, done = rig.driver.event_create(0, timing=False), threading.Event()

    def collect() -> None:
        with rig.driver._lock:
            rig.driver.event_destroy(event)
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(PATIENCE), "the verb and the finaliser wait for each other"
