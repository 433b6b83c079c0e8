from __future__ import annotations

import gc
import struct
import time
import timeit
import weakref
from collections.abc import Callable

import pytest

from aiocuda._base._types import Span
from aiocuda.driver.cuda._code import parameter_layout
from aiocuda.driver.cuda._driver import CudaDriver
from aiocuda.driver.protocol import CompiledKernel, CudaSource, LoadedKernel, Program
from aiocuda.errors import (
    CompileError,
    DriverError,
    InvalidArgumentError,
    InvalidTypeError,
    StaleHandleError,
    UnsupportedError,
    WrongDeviceError,
)
from tests.driver.cuda.fake import Fake
from tests.driver.cuda.methods import IMPORTED

_INT = 2**32 - 1

#: format → where C puts the parameters, as (offset, size).
_LAYOUTS = {
    "": [],
    "P": [(0, 8)],
    "fPPi": [(0, 4), (8, 8), (16, 8), (24, 4)],
    "bdbhbibq": [(0, 1), (8, 8), (16, 1), (18, 2), (20, 1), (24, 4), (28, 1), (32, 8)],
    "?BHIQPe": [(0, 1), (1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (24, 2)],
}


def _program(format: str, symbol: str = "_Z5saxpy") -> Program:
    return Program("saxpy", format, image=b"\x7fELF image", symbol=symbol)


def _load(driver: CudaDriver, fake: Fake, format: str, device: int = 0) -> int:
    fake.parameters(*_LAYOUTS[format])
    return driver.load(device, _program(format))


@pytest.mark.parametrize("format", _LAYOUTS)
def test_parameters_lie_as_in_c(format: str) -> None:
    pack, places = parameter_layout(format)
    assert list(places) == _LAYOUTS[format]
    assert pack.size >= sum(size for _, size in places)


def test_load_puts_the_code_on_the_device(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuLibraryLoadData", 0x11B0)
    fake.value("cuLibraryGetKernel", 0x5E70)
    fake.value("cuKernelGetFunction", 0xF0F0)
    _load(driver, fake, "fPPi")
    names = [call.name for call in fake.calls() if "Ctx" not in call.name]
    assert names[:4] == ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuFuncLoad"]
    load = fake.only("cuLibraryLoadData")
    assert load.arguments[2:4] == (0, 0)
    assert [load.arguments[at] & _INT for at in (4, 7)] == [0, 0]
    assert load.arguments[5:7] == (0, 0)
    assert fake.only("cuLibraryGetKernel").arguments[1] == 0x11B0
    assert fake.only("cuKernelGetFunction").arguments[1] == 0x5E70
    assert fake.only("cuFuncLoad").starts(0xF0F0)
    contexts = {call.context for call in fake.calls() if "Ctx" not in call.name}
    assert len(contexts) == 1
    assert 0 not in contexts


@pytest.mark.parametrize(
    ("format", "places", "words"),
    [
        ("fP", [(0, 4), (8, 8), (16, 4)], "takes more than the 2 parameters"),
        ("fP", [(0, 4)], "takes 1 parameters, its format 'fP' has 2"),
        ("fP", [(0, 8), (8, 8)], "parameter 0 of kernel 'saxpy' has 8 bytes at offset 0, but 'f'"),
        ("ff", [(0, 4), (8, 4)], "parameter 1 .* has 4 bytes at offset 8, .* has 4 at 4"),
        ("", [(0, 4)], "takes more than the 0"),
    ],
)
def test_image_and_format_must_agree(
    driver: CudaDriver, fake: Fake, format: str, places: list[tuple[int, int]], words: str
) -> None:
    fake.parameters(*places)
    with pytest.raises(InvalidTypeError, match=words):
        driver.load(0, _program(format))
    assert len(fake.calls("cuLibraryUnload")) == 1
    assert fake.current() == 0


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("cuLibraryLoadData", 200, CompileError),
        ("cuLibraryLoadData", 209, CompileError),
        ("cuLibraryGetKernel", 500, CompileError),
        ("cuKernelGetFunction", 500, DriverError),
        ("cuFuncLoad", 2, MemoryError),
        ("cuFuncGetParamInfo", 999, RuntimeError),
    ],
)
def test_image_that_does_not_load(driver: CudaDriver, fake: Fake, call: str, code: int, kind: type[Exception]) -> None:
    fake.answer(call, code)
    with pytest.raises(kind) as caught:
        driver.load(0, _program("P"))
    assert isinstance(caught.value, CompileError) == (kind is CompileError)
    assert caught.value.code == code  # type: ignore[attr-defined]


@pytest.mark.parametrize("program", [Program("k", "P"), Program("k", "P", host=print), Program("k", "P", image=b"x")])
def test_program_without_an_image(driver: CudaDriver, fake: Fake, program: Program) -> None:
    with pytest.raises(UnsupportedError, match="kernel 'k' has no CUDA image"):
        driver.load(0, program)
    assert fake.calls() == []


def test_compiles_for_the_devices_architecture(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiocuda.driver.cuda import _compiler

    source = CudaSource("k", "text")
    asked = []

    def compile_cuda(source: CudaSource, arch: str) -> CompiledKernel:
        asked.append((source, arch))
        return CompiledKernel(b"image", "symbol")

    monkeypatch.setattr(_compiler, "compile_cuda", compile_cuda)
    assert driver.compile(0, source) == CompiledKernel(b"image", "symbol")
    assert asked == [(source, "sm_7576")]  # the fake's capability is 75.76


def _loaded(owner: object, format: str) -> Program:
    return Program("saxpy", format, loaded=LoadedKernel(0x5E70, owner))


def test_kernel_of_another_library_is_not_loaded_again(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuKernelGetFunction", 0xF0F0)
    fake.parameters(*_LAYOUTS["P"])
    function = driver.load(0, _loaded(None, "P"))
    names = [call.name for call in fake.calls() if "Ctx" not in call.name]
    assert names[:3] == ["cuKernelGetFunction", "cuFuncLoad", "cuFuncGetParamInfo"]
    assert fake.only("cuKernelGetFunction").arguments[1] == 0x5E70
    assert fake.only("cuKernelGetFunction").context != 0
    driver.launcher(driver.stream_create(0, 0), function, (1, 1, 1), (1, 1, 1), 0)((1,))
    assert fake.only("cuLaunchKernelEx").arguments[1] == 0xF0F0


def test_kernel_of_another_library_is_never_unloaded(driver: CudaDriver, fake: Fake) -> None:
    fake.parameters((0, 4))
    with pytest.raises(InvalidTypeError, match="parameter 0 of kernel 'saxpy' has 4 bytes"):
        driver.load(0, _loaded(None, "P"))
    assert fake.calls("cuLibraryUnload") == []
    assert fake.current() == 0


def test_owner_of_a_loaded_kernel_lives_as_long_as_the_driver(driver: CudaDriver, fake: Fake) -> None:
    owner = {0}
    alive = weakref.ref(owner)
    fake.parameters(*_LAYOUTS["P"])
    driver.load(0, _loaded(owner, "P"))
    del owner
    gc.collect()
    assert alive() is not None


def test_one_kernel_of_another_library_with_two_formats(driver: CudaDriver, fake: Fake) -> None:
    fake.parameters((0, 4))
    functions = [driver.load(0, _loaded(None, format)) for format in "if"]
    stream = driver.stream_create(0, 0)
    launches = [driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0) for function in functions]
    launches[0]((-1,))
    assert struct.unpack_from("i", fake.launched()[1]) == (-1,)
    launches[1]((0.5,))
    assert struct.unpack_from("f", fake.launched()[1]) == (0.5,)


def test_shared_memory_of_a_function_is_not_lowered_by_another_handle(driver: CudaDriver, fake: Fake) -> None:
    fake.parameters(*_LAYOUTS["P"])
    fake.value("cuFuncGetAttribute", 49152)
    first, second = (driver.load(0, _loaded(None, "P")) for _ in range(2))
    stream = driver.stream_create(0, 0)
    driver.launcher(stream, first, (1, 1, 1), (1, 1, 1), 70000)
    fake.value("cuFuncGetAttribute", 70000)
    driver.launcher(stream, second, (1, 1, 1), (1, 1, 1), 60000)
    assert len(fake.calls("cuFuncSetAttribute")) == 1


def test_argument_is_the_address(driver: CudaDriver) -> None:
    assert driver.argument(Span(0x7F00_0000_0100, (3,), "<f4")) == 0x7F00_0000_0100


def test_launch_arrives_bit_for_bit(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuStreamCreateWithPriority", 0x7FAB_CDEF_0120)
    fake.value("cuKernelGetFunction", 0x7FAB_CDEF_0240)
    function = _load(driver, fake, "fPPi")
    stream = driver.stream_create(0, 0)
    launch = driver.launcher(stream, function, (1, 2, 3), (4, 5, 6), 7)
    fake.forget()
    launch((2.5, 0x7F11_2233_4455, 2**64 - 1, -(2**31)))
    config, packed = fake.launched()
    assert config == struct.pack("7I4xQQI4x", 1, 2, 3, 4, 5, 6, 7, 0x7FAB_CDEF_0120, 0, 0)
    padding = b"\xee" * 4
    assert packed[:28] == struct.pack("<f", 2.5) + padding + struct.pack("<QQi", 0x7F11_2233_4455, 2**64 - 1, -(2**31))
    (call,) = fake.calls()
    assert call.arguments[1] == 0x7FAB_CDEF_0240
    assert call.arguments[3] == 0
    launch([0.0, 1, 2, 3])  # the next one shares nothing with it
    assert fake.launched()[1][8:28] == struct.pack("<QQi", 1, 2, 3)


def test_scalars_of_every_type_arrive(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "bdbhbibq")
    values = (-128, 1e300, 127, -(2**15), 1, 2**31 - 1, -1, -(2**63))
    driver.launcher(driver.stream_create(0, 0), function, (1, 1, 1), (1, 1, 1), 0)(values)
    packed = fake.launched()[1]
    assert struct.unpack_from("<b7xdbxhb3xib3xq", packed) == values


def test_kernel_without_parameters(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "")
    driver.launcher(driver.stream_create(0, 0), function, (1, 1, 1), (1, 1, 1), 0)(())
    assert len(fake.calls("cuLaunchKernelEx")) == 1


def test_launchers_share_nothing(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "P")
    fake.parameters((0, 8))
    streams = driver.stream_create(0, 0), driver.stream_create(0, 0)
    first, second = (driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0) for stream in streams)
    for launch, stream, value in ((first, streams[0], 5), (second, streams[1], 6), (first, streams[0], 7)):
        launch((value,))
        config, packed = fake.launched()
        assert struct.unpack_from("Q", config, 32) == (driver.stream_handle(stream),)
        assert struct.unpack_from("Q", packed) == (value,)


def test_launch_on_an_imported_stream_releases_the_gil(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "P")
    for handle in (IMPORTED, 2):
        stream = driver.stream_import(0, handle)
        fake.forget()
        driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0)((1,))
        assert not fake.only("cuLaunchKernelEx").kept_gil
        assert struct.unpack_from("Q", fake.launched()[0], 32) == (handle,)
        assert (fake.only("cuLaunchKernelEx").context != 0) == (handle == 2)


def test_launcher_of_a_destroyed_stream(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "P")
    stream = driver.stream_create(0, 0)
    launch = driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0)
    driver.stream_destroy(stream)
    fake.forget()
    with pytest.raises(StaleHandleError, match="the stream has been destroyed"):
        launch((1,))
    with pytest.raises(StaleHandleError, match=f"stream {stream}"):
        driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0)
    assert fake.calls() == []


def test_kernel_of_another_device(driver: CudaDriver, fake: Fake) -> None:
    driver.device_open(1)
    function = _load(driver, fake, "P", device=1)
    with pytest.raises(WrongDeviceError, match="'saxpy' is loaded on device 1, the stream is of device 0"):
        driver.launcher(driver.stream_create(0, 0), function, (1, 1, 1), (1, 1, 1), 0)
    with pytest.raises(StaleHandleError, match="function 12345"):
        driver.launcher(driver.stream_create(0, 0), 12345, (1, 1, 1), (1, 1, 1), 0)


def test_shared_memory_is_asked_for_once(driver: CudaDriver, fake: Fake) -> None:
    fake.value("cuFuncGetAttribute", 49152)
    fake.value("cuKernelGetFunction", 0xF0F0)
    function = _load(driver, fake, "P")
    stream = driver.stream_create(0, 0)
    for shared in (0, 49152, 60000, 60000, 50000, 70000):
        driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), shared)((1,))
        assert struct.unpack_from("I", fake.launched()[0], 24) == (shared,)
    raised = fake.calls("cuFuncSetAttribute")
    assert [call.arguments[0] for call in raised] == [0xF0F0] * 2
    assert [call.arguments[1] & _INT for call in raised] == [8, 8]  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert [call.arguments[2] & _INT for call in raised] == [60000, 70000]


def test_too_much_shared_memory(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "P")
    fake.answer("cuFuncSetAttribute", 1, times=1)
    stream = driver.stream_create(0, 0)
    with pytest.raises(InvalidArgumentError, match=r"'saxpy' cannot have 300,000 bytes .* a block has 97"):
        driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 300_000)
    driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 200)  # which asks again
    assert len(fake.calls("cuFuncSetAttribute")) == 2


def test_launch_that_fails(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "P")
    launch = driver.launcher(driver.stream_create(0, 0), function, (1, 1, 1), (1, 1, 1), 0)
    fake.answer("cuLaunchKernelEx", 701, times=1)
    with pytest.raises(InvalidArgumentError, match=r"device 0: cuLaunchKernelEx: .* \(701\).*fewer threads"):
        launch((1,))
    launch((1,))


@pytest.mark.slow
def test_launch_is_cheap(driver: CudaDriver, fake: Fake) -> None:
    function = _load(driver, fake, "fPPi")
    launch = driver.launcher(driver.stream_create(0, 0), function, (1, 1, 1), (1, 1, 1), 0)
    arguments = (2.0, 0x7F11_2233_4455, 0x7F11_2233_5555, 7)

    def processor_time(call: Callable[[], object]) -> float:
        return timeit.timeit(call, time.thread_time, number=5_000)

    pairs = [(processor_time(lambda: launch(arguments)), processor_time(lambda: str(arguments))) for _ in range(20)]
    launches, texts = zip(*pairs, strict=True)
    assert min(launches) < 10 * min(texts)  # it is as long; the bound only finds another order of magnitude
