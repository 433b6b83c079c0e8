from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from aiocuda.driver._port import Port
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.cuda._notify import notifier_limit
from aiocuda.errors import (
    BusyError,
    DeviceFault,
    InvalidTypeError,
    StaleHandleError,
    UnsupportedError,
)
from tests.driver.cuda.fake import Fake

_SECONDS = 10.0


@pytest.fixture
def port(driver: CudaDriver) -> Iterator[Port]:
    port = driver.open_port(lambda: None)
    yield port
    port.close()


def _readable(port: Port, seconds: float = 0) -> bool:
    descriptor = port.fileno()
    assert descriptor is not None
    return bool(select.select([descriptor], [], [], seconds)[0])


def _wait(port: Port, count: int) -> list[int]:
    """The tags, once so many have come."""
    tags: list[int] = []
    end = time.monotonic() + _SECONDS
    while len(tags) < count and _readable(port, end - time.monotonic()):
        tags += port.drain()
    assert len(tags) >= count, f"{len(tags)} of {count} tags came within {_SECONDS} s"
    return tags


def test_rings_on_another_thread_and_not_before(driver: CudaDriver, fake: Fake, port: Port) -> None:
    notifier = driver.notifier(0, port)
    fake.hold()
    notifier.ring(driver.event_create(0, False), 42)
    assert not _readable(port)  # the tag is in the FILE's buffer, the first one too
    fake.release()
    assert _wait(port, 1) == [42]
    assert not _readable(port)


def test_ring_uses_the_side_stream(driver: CudaDriver, fake: Fake, port: Port) -> None:
    fake.value("cuStreamCreateWithPriority", 0xBE11)
    fake.value("cuEventCreate", 0xE0E0)
    notifier = driver.notifier(0, port)
    event = driver.event_create(0, False)
    fake.forget()
    notifier.ring(event, 1)
    wait, function = fake.calls()
    assert wait.name == "cuStreamWaitEvent"
    assert wait.starts(0xBE11, 0xE0E0)
    assert function.name == "cuLaunchHostFunc"
    libc = ctypes.CDLL(None)
    assert function.starts(0xBE11, ctypes.cast(libc.fflush, ctypes.c_void_p).value or 0)
    assert wait.kept_gil
    assert function.kept_gil
    _wait(port, 1)


@pytest.mark.parametrize("tag", [0, 1, 2**31, 2**32 + 5, 2**63 - 1])
def test_tag_comes_unchanged(driver: CudaDriver, port: Port, tag: int) -> None:
    driver.notifier(0, port).ring(driver.event_create(0, False), tag)
    assert _wait(port, 1) == [tag]


def test_rings_again_and_again(driver: CudaDriver, port: Port) -> None:
    notifier, event = driver.notifier(0, port), driver.event_create(0, False)
    for tag in range(1000):
        notifier.ring(event, tag)
        assert _wait(port, 1) == [tag]
    assert not _readable(port)


def test_many_notifiers_at_the_same_time(driver: CudaDriver, fake: Fake, port: Port) -> None:
    event = driver.event_create(0, False)
    notifiers = [driver.notifier(0, port) for _ in range(driver.notifier_limit(0))]
    assert len(notifiers) == 24
    fake.hold()
    for tag, notifier in enumerate(notifiers):
        notifier.ring(event, tag)
    assert not _readable(port)
    fake.release()
    assert sorted(_wait(port, len(notifiers))) == list(range(len(notifiers)))


def test_each_port_receives_its_own_tags(driver: CudaDriver, port: Port) -> None:
    event = driver.event_create(0, False)
    other = driver.open_port(lambda: None)
    driver.notifier(0, port).ring(event, 1)
    driver.notifier(0, other).ring(event, 2)
    assert _wait(port, 1) == [1]
    assert _wait(other, 1) == [2]
    other.close()


def test_no_python_runs_to_ring_it(driver: CudaDriver, fake: Fake, port: Port) -> None:
    # This thread holds the GIL until the tag is in the pipe: nothing that wants it could have put it there.
    descriptor = port.fileno()
    assert descriptor is not None
    libc = ctypes.PyDLL(None)  # keeps the GIL while it polls

    class PollFd(ctypes.Structure):
        _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]

    poll = PollFd(descriptor, select.POLLIN, 0)
    driver.notifier(0, port).ring(driver.event_create(0, False), 7)
    assert libc.poll(ctypes.byref(poll), ctypes.c_ulong(1), int(_SECONDS * 1000)) == 1
    assert port.drain() == [7]


@pytest.mark.parametrize(("call", "code"), [("cuStreamWaitEvent", 905), ("cuLaunchHostFunc", 905)])
def test_ring_that_fails_leaves_nothing_armed(driver: CudaDriver, fake: Fake, port: Port, call: str, code: int) -> None:
    notifier, event = driver.notifier(0, port), driver.event_create(0, False)
    fake.answer(call, code, times=1)
    with pytest.raises(BusyError, match=call):
        notifier.ring(event, 1)
    notifier.ring(event, 2)
    assert _wait(port, 1) == [2]
    assert not _readable(port)


def test_ring_that_faults(driver: CudaDriver, fake: Fake, port: Port) -> None:
    notifier, event = driver.notifier(0, port), driver.event_create(0, False)
    fake.answer("cuLaunchHostFunc", 700)
    for _ in range(2):
        with pytest.raises(DeviceFault):
            notifier.ring(event, 1)
    with pytest.raises(DeviceFault):
        driver.notifier(0, port)
    assert not _readable(port)
    assert len(fake.calls("cuLaunchHostFunc")) == 1


def test_ring_for_an_event_that_is_gone(driver: CudaDriver, fake: Fake, port: Port) -> None:
    notifier, event = driver.notifier(0, port), driver.event_create(0, False)
    driver.event_destroy(event)
    fake.forget()
    with pytest.raises(StaleHandleError):
        notifier.ring(event, 1)
    assert fake.calls() == []


def test_notifier_of_a_device_that_is_not_open(driver: CudaDriver, port: Port) -> None:
    with pytest.raises(ValueError, match="CUDA device 1 is not open"):
        driver.notifier(1, port)


def test_port_of_another_driver_is_refused(driver: CudaDriver) -> None:
    with pytest.raises(InvalidTypeError, match="no port of this driver"):
        driver.notifier(0, object())  # type: ignore[arg-type]


def test_port_without_a_pipe(driver: CudaDriver, fake: Fake) -> None:
    from aiocuda.driver._port import open_port

    port = open_port(lambda: None, watchable=False)
    with pytest.raises(UnsupportedError, match="no notifiers"):
        driver.notifier(0, port)
    assert "cuStreamCreateWithPriority" not in fake.names()
    port.close()


def test_failure_to_make_a_stream(driver: CudaDriver, fake: Fake, port: Port) -> None:
    fake.answer("cuStreamCreateWithPriority", 2, times=1)
    with pytest.raises(MemoryError):
        driver.notifier(0, port)
    assert driver.statistics()["notifiers"] == 0
    driver.notifier(0, port).ring(driver.event_create(0, False), 3)
    assert _wait(port, 1) == [3]


def test_notifiers_are_not_counted_as_streams(driver: CudaDriver, port: Port) -> None:
    driver.notifier(0, port)
    counted = driver.statistics()
    assert (counted["notifiers"], counted["streams"], counted["streams_created"]) == (1, 0, 0)


@pytest.mark.parametrize(("queues", "notifiers"), [(32, 24), (8, 4), (16, 8), (2, 1), (1, 0)])
def test_limit(queues: int, notifiers: int) -> None:
    assert notifier_limit(queues) == notifiers


def test_no_notifiers_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert notifier_limit(32) == 0


def test_notifiers_add_no_thread_and_no_descriptor(driver: CudaDriver, port: Port) -> None:
    event = driver.event_create(0, False)
    notifiers = [driver.notifier(0, port) for _ in range(4)]
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for tag, notifier in enumerate(notifiers * 25):
        notifier.ring(event, tag)
        _wait(port, 1)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
