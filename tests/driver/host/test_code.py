from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest

from aiocuda._base._types import Span
from aiocuda.driver.protocol import CudaSource, Program
from aiocuda.errors import DeviceFault, InvalidArgumentError, StaleHandleError, UnsupportedError, WrongDeviceError
from tests.driver.host.kit import Rig, address_of

ONE = (1, 1, 1)


def test_host_implementation_receives_the_kernels_arguments(rig: Rig) -> None:
    stream = rig.stream()
    address = rig.uploaded(stream, np.arange(12), "f4")
    seen: list[Any] = []

    def twin(factor: np.float32, data: np.ndarray[Any, np.dtype[np.float32]], count: np.int32, flag: np.bool_) -> None:
        data *= factor
        seen.extend([factor, data.shape, data.dtype, count, flag])

    rig.launch(stream, twin, 2.5, Span(address + 16, (2, 4), "<f4"), 3, True, format="fPi?")
    result = rig.download(stream, address, 12, "f4")
    assert result.tolist() == [0, 1, 2, 3, *(2.5 * np.arange(4, 12))]
    assert seen == [np.float32(2.5), (2, 4), np.dtype("f4"), 3, True]
    assert [type(each) for each in (seen[0], *seen[3:])] == [np.float32, np.int32, np.bool_]


@pytest.mark.parametrize(
    ("code", "value", "kind"),
    [
        ("b", -1, np.int8),
        ("B", 255, np.uint8),
        ("h", -1, np.int16),
        ("H", 1, np.uint16),
        ("I", 2**32 - 1, np.uint32),
        ("q", -1, np.int64),
        ("Q", 2**64 - 1, np.uint64),
        ("e", 0.5, np.float16),
        ("d", 0.1, np.float64),
        ("f", np.float64(0.5), np.float32),
        ("i", np.int64(7), np.int32),
    ],
)
def test_scalars_have_the_parameters_type(rig: Rig, code: str, value: Any, kind: type) -> None:
    seen: list[Any] = []
    stream = rig.stream()
    rig.launch(stream, seen.append, value, format=code)
    rig.finish(stream)
    assert seen == [value]
    assert type(seen[0]) is kind


def test_function_is_forgotten_with_its_last_handle_and_launcher(rig: Rig) -> None:
    class Host:
        def __call__(self) -> None:
            ran.append(True)

    ran: list[bool] = []
    host = Host()
    dropped = weakref.ref(host)
    stream = rig.stream()
    function = rig.driver.load(0, Program("k", "", host=host))
    launch = rig.driver.launcher(stream, function, ONE, ONE, 0)
    number = int(function)
    del function, host
    gc.collect()
    launch(())
    rig.finish(stream)
    assert ran == [True]
    del launch
    gc.collect()
    assert dropped() is None
    with pytest.raises(StaleHandleError, match=f"{number} is not a function of this driver"):
        rig.driver.launcher(stream, number, ONE, ONE, 0)


def test_empty_buffer_is_an_empty_view(rig: Rig) -> None:
    seen: list[Any] = []
    stream = rig.stream()
    rig.launch(stream, seen.append, Span(0, (0, 3), "<f8"), format="P")
    rig.finish(stream)
    assert (seen[0].shape, seen[0].dtype) == ((0, 3), np.dtype("f8"))


def test_pinned_and_managed_memory_are_pointers_too(rig: Rig) -> None:
    stream = rig.stream()
    pinned = rig.pinned(range(8))
    managed = rig.driver.managed_allocate(0, 8)

    def twin(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        target[:] = source + 1

    rig.launch(stream, twin, Span(address_of(pinned), (8,), "|u1"), Span(managed, (8,), "|u1"), format="PP")
    assert rig.download(stream, managed, 8).tolist() == list(range(1, 9))


def test_values_are_those_of_the_call(rig: Rig) -> None:
    stream = rig.stream()
    gate = rig.hold(stream)
    seen: list[int] = []
    function = rig.driver.load(0, Program("note", "i", host=seen.append))
    launch = rig.driver.launcher(stream, function, ONE, ONE, 0)
    values = [1]
    launch(values)
    values[0] = 2
    launch(values)
    gate.open()
    rig.finish(stream)
    assert seen == [1, 2]


@pytest.mark.parametrize("wanted", [True, False])
def test_grid_and_block_are_passed_if_the_host_implementation_takes_them(rig: Rig, wanted: bool) -> None:
    stream = rig.stream()
    seen: list[dict[str, object]] = []
    program = Program("note", "", host=lambda **keywords: seen.append(keywords), host_takes_grid=wanted)
    rig.driver.launcher(stream, rig.driver.load(0, program), (4, 2, 1), (32, 1, 1), 0)(())
    rig.finish(stream)
    assert seen == [{"grid": (4, 2, 1), "block": (32, 1, 1)} if wanted else {}]


def test_modelled_time_is_slept_out(rig: Rig) -> None:
    stream = rig.stream()
    ends = [rig.record(stream, timing=True)]
    for _ in range(2):
        rig.launch(stream, lambda: None, seconds=0.02)
        ends.append(rig.record(stream, timing=True))
    rig.finish(stream)
    for start, end in itertools.pairwise(ends):
        assert rig.driver.event_elapsed_ms(start, end) >= 20.0


def test_kernel_without_a_host_implementation_is_refused_with_the_cure(rig: Rig) -> None:
    assert not rig.driver.wants_image
    with pytest.raises(UnsupportedError, match=r"'saxpy' has no host implementation.*Kernel\('saxpy', \.\.\., host="):
        rig.driver.load(0, Program("saxpy", "fP", image=b"cubin", symbol="saxpy"))
    with pytest.raises(UnsupportedError, match="'saxpy' cannot be compiled"):
        rig.driver.compile(0, CudaSource("saxpy", "..."))


@pytest.mark.parametrize("format", ["4s", "iP x", "F"])
def test_unknown_parameter_is_refused(rig: Rig, format: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be a parameter of a host implementation"):
        rig.driver.load(0, Program("odd", format, host=print))


def test_launch_on_a_destroyed_stream_is_stale(rig: Rig) -> None:
    stream = rig.stream()
    function = rig.driver.load(0, Program("nothing", "", host=lambda: None))
    launch = rig.driver.launcher(stream, function, ONE, ONE, 0)
    rig.driver.stream_destroy(stream)
    with pytest.raises(StaleHandleError, match=f"stream {stream} was destroyed"):
        launch(())
    with pytest.raises(StaleHandleError, match="999 is not a function"):
        rig.driver.launcher(rig.stream(), 999, ONE, ONE, 0)


def test_function_of_another_device_is_refused(rig: Rig) -> None:
    function = rig.driver.load(1, Program("nothing", "", host=lambda: None))
    with pytest.raises(WrongDeviceError, match="loaded on device 1"):
        rig.driver.launcher(rig.stream(0), function, ONE, ONE, 0)


@pytest.mark.parametrize("extra", [-1, 1])
def test_pointer_out_of_bounds_is_an_illegal_address(rig: Rig, extra: int) -> None:
    stream = rig.stream()
    address = rig.driver.allocate(0, 64, stream)
    rig.launch(stream, lambda data: None, Span(address + extra, (64,), "|u1"), format="P")
    with pytest.raises(DeviceFault, match="illegal address in a kernel") as caught:
        rig.finish(stream)
    assert (caught.value.code, caught.value.device) == (700, 0)


@pytest.mark.parametrize("address", [0, 64])
def test_pointer_to_nowhere_is_an_illegal_address(rig: Rig, address: int) -> None:
    stream = rig.stream()
    rig.launch(stream, lambda data: None, Span(address, (8,), "|u1"), format="P")
    with pytest.raises(DeviceFault, match=f"8 bytes at {address:#x} are not memory"):
        rig.finish(stream)


def test_memory_of_another_device_is_an_illegal_address(rig: Rig) -> None:
    here, there = rig.stream(0), rig.stream(1)
    address = rig.driver.allocate(1, 8, there)
    rig.finish(there)
    rig.launch(here, lambda data: None, Span(address, (8,), "|u1"), format="P")
    with pytest.raises(DeviceFault, match="touched on device 0"):
        rig.finish(here)


def test_wrong_number_of_values_is_a_fault_and_no_hang(rig: Rig) -> None:
    stream = rig.stream()
    rig.launch(stream, lambda value: None, 1, 2, format="i")
    with pytest.raises(DeviceFault, match="a kernel raised ValueError"):
        rig.finish(stream)
