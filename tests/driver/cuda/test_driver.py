"""What must hold of every method: the calling thread's context, the GIL, the latch, the counts."""

from __future__ import annotations

import asyncio
import inspect
import select
import threading
from collections.abc import Callable

import pytest

from aiocuda._base._fault_watch import FaultWatch
from aiocuda._base._faults import FAULTS
from aiocuda.driver.cuda import _abi
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import Driver
from aiocuda.errors import (
    BusyError,
    DeviceFault,
    DriverError,
    InvalidArgumentError,
    StaleHandleError,
    UnsupportedError,
)
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import HOST_ONLY, IMPORTED, RELEASING, Things, methods, things

_MAY_BLOCK = {
    "device_open",
    "stream_reserve",
    "stream_synchronize",
    "pool_trim",
    "pinned_allocate",
    "pinned_deallocate",
    "pin",
    "unpin",
    "managed_allocate",
    "managed_deallocate",
    "advise",
    "managed_attributes",
    "load",
    "graph_build",
    "graph_destroy",
}

#: These do not keep it either: the number of hardware queue entries of a graph is unknown.
_RELEASED = _MAY_BLOCK | {"graph_launch", "graph_update"}

#: Calls that cannot wait, whose GIL `AIOCUDA_GIL` decides.
_CANNOT_WAIT = {
    "stream_wait",
    "waiter",
    "recorded_wait",
    "event_record",
    "recorder",
    "event_query",
    "allocate",
    "deallocate",
    "upload",
    "download",
    "copy",
    "fill",
    "launch",
    "recorded_launch",
    "recorded_upload",
    "recorded_download",
    "ring",
    "begin_queries",
    "end_queries",
}

_NAMES = list(methods(CudaDriver(), Things(0, 0, 0, 0, 0, lambda _: None, None, None, 0)))  # type: ignore[arg-type]


def _call(driver: CudaDriver, made: Things, method: str) -> Callable[[], object]:
    return methods(driver, made)[method]


def test_every_method_of_the_protocol_exists(fake: Fake) -> None:
    driver: Driver = CudaDriver(fake.path)  # mypy compares the signatures
    methods = {name for name, _ in inspect.getmembers(Driver, inspect.isfunction) if not name.startswith("_")}
    assert all(callable(getattr(driver, name)) for name in methods)
    assert methods == (set(_NAMES) | HOST_ONLY) - {"launch", "ring"}


def test_one_driver_per_process(fake: Fake) -> None:
    assert CudaDriver.get() is CudaDriver.get()


def test_making_it_touches_nothing(fake: Fake) -> None:
    driver = CudaDriver(fake.path)
    assert driver.fault is None
    assert driver.name == "cuda"
    assert driver.wants_image
    assert driver.statistics()["calls"] == 0
    assert fake.calls() == []


@pytest.mark.parametrize("method", sorted(set(_NAMES) - {"device_count", "device_open", "launch", "ring"}))
def test_methods_before_a_device_is_open(fake: Fake, method: str) -> None:
    driver = CudaDriver(fake.path)
    port = driver.open_port(lambda: None)
    made = Things(3, 5, 7, 9, 11, lambda _: None, port, None, 13)  # type: ignore[arg-type]
    with pytest.raises((InvalidArgumentError, StaleHandleError)):
        _call(driver, made, method)()
    port.close()
    assert fake.calls() == []


@pytest.mark.parametrize("device", [-1, 2, 99])
def test_device_that_is_not_there(fake: Fake, device: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"device {device}: there are 2 CUDA devices"):
        CudaDriver(fake.path).device_open(device)
    assert "cuDevicePrimaryCtxRetain" not in fake.names()


def test_properties(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuDeviceTotalMem", 80 << 30)
    properties = driver.device_open(1)
    assert properties.name == "Fake GPU"
    assert properties.total_memory == 80 << 30
    # The fake gives each attribute its own number.
    assert properties.compute_capability == (75, 76)
    assert (properties.max_grid, properties.max_block, properties.max_threads_per_block) == ((5, 6, 7), (2, 3, 4), 1)
    assert (properties.default_shared_bytes, properties.max_shared_bytes) == (8, 97)
    assert (properties.multiprocessors, properties.copy_engines) == (16, 40)


def test_opening_again_makes_nothing(driver: CudaDriver, fake: Fake) -> None:
    first = driver.device_open(0)
    assert driver.device_open(0) is first
    assert fake.calls() == []


def test_pool_keeps_what_is_freed(fake: Fake) -> None:
    driver = CudaDriver(fake.path)
    fake.value("cuMemPoolCreate", 0x9001)
    driver.device_open(1)
    dependencies, threshold = fake.calls("cuMemPoolSetAttribute")
    assert threshold.starts(0x9001, _abi.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
    assert fake.bytes(8) == b"\xff" * 8  # all of it
    assert dependencies.starts(0x9001, _abi.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)


@pytest.mark.parametrize("call", ["cuMemPoolCreate", "cuMemPoolSetAttribute"])
def test_opening_that_fails_leaves_nothing(fake: Fake, call: str) -> None:
    driver = CudaDriver(fake.path)
    fake.answer(call, 801, times=1)
    with pytest.raises(UnsupportedError, match=call):
        driver.device_open(0)
    assert fake.names().count("cuDevicePrimaryCtxRelease") == 1
    assert fake.names().count("cuMemPoolDestroy") == (call == "cuMemPoolSetAttribute")
    fake.forget()
    driver.device_open(0)
    assert "cuDevicePrimaryCtxRetain" in fake.names()


def test_device_that_another_process_has_to_itself(fake: Fake) -> None:
    driver = CudaDriver(fake.path)
    fake.answer("cuDevicePrimaryCtxRetain", 46, times=1)
    with pytest.raises(BusyError, match=r"device 1: .*\(46\).*exclusive mode.*nvidia-smi -q -d COMPUTE"):
        driver.device_open(1)
    assert "cuMemPoolCreate" not in fake.names()
    driver.device_open(1)  # once it is free


def test_versions(driver: CudaDriver) -> None:
    versions = driver.versions()
    assert versions["cuda-driver"] == "13.0"
    assert "cuda-bindings" in versions


def test_closing_does_nothing(driver: CudaDriver) -> None:
    driver.close()
    driver.close()
    assert driver.stream_create(0, 0)


@pytest.mark.parametrize("foreign", [0, 0xC0DE])
@pytest.mark.parametrize("outcome", [0, 1, 700], ids=["works", "fails", "faults"])
@pytest.mark.parametrize("method", _NAMES)
def test_context_of_the_calling_thread_stays(
    driver: CudaDriver, fake: Fake, made: Things, method: str, outcome: int, foreign: int
) -> None:
    call = _call(driver, made, method)
    if foreign:
        fake.push(foreign)
    if outcome:
        call()
        contexts = {"cuCtxPushCurrent", "cuCtxPopCurrent"}
        names = [name for name in fake.names() if name not in contexts]
        fake.forget()
        fresh = things(driver, fake)
        fresh.port.close()
        call = _call(driver, fresh, method)
        for name in names:
            fake.answer(name, outcome)
        try:
            call()
        except (DeviceFault, DriverError, InvalidArgumentError, StaleHandleError):
            assert names
    else:
        call()
    assert fake.current() == foreign


@pytest.mark.parametrize("choice", ["keep", "release"])
@pytest.mark.parametrize("method", sorted(_CANNOT_WAIT | _RELEASED))
def test_gil_is_kept_or_released_as_documented(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, method: str, choice: str
) -> None:
    monkeypatch.setenv("AIOCUDA_GIL", choice)
    driver = CudaDriver(fake.path)
    made = things(driver, fake)
    made.port.close()
    if method == "device_open":
        driver = CudaDriver(fake.path)
    _call(driver, made, method)()
    contexts = {"cuCtxPushCurrent", "cuCtxPopCurrent"}  # of this thread only: they cannot wait
    calls = [call for call in fake.calls() if call.name not in contexts]
    assert calls
    kept = method in _CANNOT_WAIT and choice == "keep"
    assert {call.kept_gil for call in calls} == {kept}


@pytest.mark.parametrize("method", _NAMES)
def test_nothing_is_called_after_a_fault(driver: CudaDriver, fake: Fake, made: Things, method: str) -> None:
    call = _call(driver, made, method)
    fake.answer("cuEventQuery", 700)
    with pytest.raises(DeviceFault):
        driver.event_query(made.event)
    fake.answer("cuEventQuery", 0)
    fake.forget()
    counted = driver.statistics()["calls"]
    if method in RELEASING:
        call()
    else:
        with pytest.raises(DeviceFault, match=r"\(700\)"):
            call()
    assert fake.calls() == []
    assert driver.statistics()["calls"] == counted


@pytest.mark.parametrize("method", _NAMES)
def test_every_method_that_reaches_the_device_is_counted(
    driver: CudaDriver, fake: Fake, made: Things, method: str
) -> None:
    before = driver.statistics()["calls"]
    _call(driver, made, method)()
    if method in {"device_open", "stream_default", "stream_import", "notifier_limit"}:  # known already
        assert driver.statistics()["calls"] == before
    else:
        assert driver.statistics()["calls"] > before


def test_the_fault_names_the_call_and_the_device(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.answer("cuEventQuery", 700)
    with pytest.raises(DeviceFault) as caught:
        driver.event_query(made.event)
    assert str(caught.value) == (
        "device 0: cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700): as described; CUDA is lost to this process: "
        "start a new one"
    )
    assert (caught.value.code, caught.value.device, caught.value.operation) == (700, 0, None)
    assert driver.fault is not None
    assert driver.fault is not caught.value


def test_watches_get_the_fault_once(driver: CudaDriver, fake: Fake, made: Things) -> None:
    class Holder:
        def __init__(self) -> None:
            self.calls = 0

        def on_fault(self) -> None:
            self.calls += 1

    async def turn() -> None: ...

    fake.answer("cuEventQuery", 700)
    holder, loop = Holder(), asyncio.new_event_loop()
    watch = FaultWatch(loop, holder.on_fault)
    try:
        for _ in range(2):
            with pytest.raises(DeviceFault):
                driver.event_query(made.event)
        loop.run_until_complete(turn())
    finally:
        watch.stop()
        loop.close()
    assert (holder.calls, watch.fault) == (1, driver.fault)
    assert FAULTS.of_process is None  # a library of tests ends nothing


def test_each_caller_gets_an_equal_error_object(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.answer("cuEventQuery", 719)
    seen = []
    for _ in range(3):
        with pytest.raises(DeviceFault) as caught:
            driver.event_query(made.event)
        seen.append(caught.value)
    assert len(fake.calls("cuEventQuery")) == 1
    assert len({id(error) for error in seen}) == 3
    assert len({(str(error), error.code, error.device) for error in seen}) == 1


def test_the_first_fault_stays(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.answer("cuEventQuery", 700)
    fake.answer("cuStreamQuery", 719)
    barrier = threading.Barrier(2)
    raised: list[DeviceFault] = []

    def query(call: Callable[[int], bool], handle: int) -> None:
        barrier.wait(60)
        with pytest.raises(DeviceFault) as caught:
            call(handle)
        raised.append(caught.value)

    threads = [
        threading.Thread(target=query, args=(driver.event_query, made.event)),
        threading.Thread(target=query, args=(driver.stream_query, made.stream)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert driver.fault is not None
    assert [error.code for error in raised] == [driver.fault.code] * 2


def test_blame(driver: CudaDriver, fake: Fake, made: Things) -> None:
    driver.blame("nothing has happened")
    assert driver.fault is None
    fake.answer("cuEventQuery", 700)
    with pytest.raises(DeviceFault):
        driver.event_query(made.event)
    driver.blame("launch saxpy")
    driver.blame("download")
    with pytest.raises(DeviceFault, match=r"first seen by launch saxpy") as caught:
        driver.stream_query(made.stream)
    assert caught.value.operation == "launch saxpy"


def test_latch_survives_streams_of_every_kind(driver: CudaDriver, fake: Fake, made: Things) -> None:
    default = driver.stream_import(1, 0)
    fake.answer("cuStreamQuery", 700)
    with pytest.raises(DeviceFault) as caught:
        driver.stream_query(default)
    assert caught.value.device == 1
    fake.forget()
    for stream in (0, default, IMPORTED, made.stream):
        with pytest.raises(DeviceFault):
            driver.stream_query(stream)
    assert fake.calls() == []


def test_offloading_goes_on_after_a_fault(driver: CudaDriver, fake: Fake, made: Things) -> None:
    fake.answer("cuEventQuery", 700)
    with pytest.raises(DeviceFault):
        driver.event_query(made.event)
    done: list[int] = []
    driver.offload(lambda: done.append(1), made.port, 42)
    descriptor = made.port.fileno()
    assert descriptor is not None
    assert select.select([descriptor], [], [], 10)[0]
    assert done == [1]
    assert made.port.drain() == [42]
    assert driver.now() > 0


@pytest.mark.parametrize("device", [0, 1])
def test_fault_in_a_context_names_the_device(driver: CudaDriver, fake: Fake, device: int) -> None:
    driver.device_open(1)
    fake.answer("cuMemGetInfo", 700)
    with pytest.raises(DeviceFault, match=f"device {device}: "):
        driver.memory_info(device)
