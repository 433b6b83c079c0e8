"""`aiocuda.wait` for objects of PyTorch, CuPy, numba-cuda and cuda.core: stand-ins, over a recording libcuda.

`tests/integrations` has the libraries themselves, on a GPU.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aiocuda
from aiocuda import InvalidArgumentError, InvalidTypeError, UnsupportedError
from aiocuda.completion import _wait
from aiocuda.driver.cuda._driver import CudaDriver
from tests.core.test_over_libcuda import fake, library
from tests.driver.cuda.fake import Fake
from tests.helpers import quickly, turns

__all__ = ["fake", "library"]  # fixtures

pytestmark = pytest.mark.asyncio

STREAM, CURRENT, EVENT = 0x5EED0, 0x5EED8, 0xE7E90


@pytest.fixture
def driver(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    made = CudaDriver(fake.path)
    fake.value("cuDeviceGetCount", 2)
    monkeypatch.setattr(_wait, "_cuda", [made])
    return made


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wait, "_cuda", ["no NVIDIA driver"])


def of(module: str) -> Callable[[type], type]:
    """Give a class the module of a library."""

    def decorate(cls: type) -> type:
        cls.__module__ = module
        return cls

    return decorate


class Passing:
    """The methods of an event that a program can ask."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def wait(self, stream: object = None) -> None:
        raise AssertionError("it makes a stream wait, and returns at once")


class Torch(SimpleNamespace):
    """The module ``torch``, with two GPUs."""

    def __init__(self) -> None:
        super().__init__()
        torch = self
        self.version = SimpleNamespace(hip=None)

        @of("torch")
        class Tensor:
            def __init__(self, type: str = "cuda", index: int | None = 1) -> None:
                self.device = SimpleNamespace(type=type, index=index)
                self.shape = (3,)

            def __repr__(self) -> str:
                raise AssertionError("it reads the values on the device")

        @of("torch.cuda.streams")
        class Event(Passing):
            def __init__(self, handle: int = EVENT) -> None:
                super().__init__()
                self.cuda_event = handle
                self.device = SimpleNamespace(type="cuda", index=1) if handle else None

        @of("torch.cuda.streams")
        class Stream(Passing):
            def __init__(self, handle: int = STREAM, index: int = 1) -> None:
                super().__init__()
                self.cuda_stream = handle
                self.device = SimpleNamespace(type="cuda", index=index)
                self.recorded: list[Any] = []

            def record_event(self) -> Any:
                self.recorded.append(Event())
                return self.recorded[-1]

        self.Tensor = Tensor
        self.cuda = SimpleNamespace(
            Event=Event, Stream=Stream, is_initialized=lambda: True,
            current_stream=lambda device=None: torch.current(None if device is None else device.index),
        )  # fmt: skip
        self.mps = SimpleNamespace(synchronize=lambda: None)

    def current(self, index: int | None) -> Any:
        self.stream = self.cuda.Stream(CURRENT, 0 if index is None else index)
        return self.stream


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


async def recorded(driver: CudaDriver, fake: Fake, x: object) -> tuple[int, list[int]]:
    """Wait; return the stream of the event that was recorded, and the devices that are open."""
    await quickly(aiocuda.wait(x))
    return fake.only("cuEventRecord").arguments[1], list(driver.open_devices)


async def test_torch_stream(driver: CudaDriver, fake: Fake, torch: Torch) -> None:
    fake.value("cuStreamGetDevice", 1)
    assert await recorded(driver, fake, torch.cuda.Stream()) == (STREAM, [1])


async def test_torch_tensor_on_a_gpu(driver: CudaDriver, fake: Fake, torch: Torch) -> None:
    fake.value("cuStreamGetDevice", 1)
    assert await recorded(driver, fake, torch.Tensor()) == (CURRENT, [1])


async def test_torch_tensor_on_the_cpu(driver: CudaDriver, fake: Fake, torch: Torch) -> None:
    """A copy to it may be in flight, on the current stream of the current device."""
    assert await recorded(driver, fake, torch.Tensor("cpu", None)) == (CURRENT, [0])


async def test_subclass_of_a_tensor(driver: CudaDriver, fake: Fake, torch: Torch) -> None:
    class Parameter(torch.Tensor):  # type: ignore[name-defined,misc]
        pass

    assert await recorded(driver, fake, [Parameter("cpu")]) == (CURRENT, [0])


async def test_torch_event(driver: CudaDriver, fake: Fake, torch: Torch) -> None:
    await quickly(aiocuda.wait(torch.cuda.Event()))
    assert [call.arguments[0] for call in fake.calls("cuEventQuery")] == [EVENT]
    assert not fake.calls("cuEventRecord")


@pytest.mark.parametrize("hip", [None, "6.2"])
async def test_torch_event_that_was_never_recorded(torch: Torch, hip: str | None) -> None:
    torch.version.hip = hip
    with pytest.raises(InvalidArgumentError, match="never recorded"):
        aiocuda.wait(torch.cuda.Event(0))


async def test_tensor_on_the_cpu_without_any_gpu_is_done_at_once(torch: Torch) -> None:
    torch.cuda.is_initialized = lambda: False
    waiting = aiocuda.wait(torch.Tensor("cpu", None))
    assert waiting.done()
    assert await quickly(waiting) is None


async def test_torch_on_another_accelerator(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm is PyTorch's ``cuda``; no CUDA driver is looked for. An event of now takes the place of the stream."""
    monkeypatch.setattr(_wait, "_find", lambda: pytest.fail("looked for CUDA"))
    monkeypatch.setattr(_wait, "_cuda", [])
    torch.version.hip = "6.2"
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    waits = [(event, event), (stream, stream.recorded), (torch.Tensor(), None), (torch.Tensor("cpu", None), None)]
    for thing, passing in waits:
        task = asyncio.ensure_future(aiocuda.wait(thing).wait())
        await turns()
        assert not task.done()
        events = torch.stream.recorded if passing is None else passing
        (events[0] if isinstance(events, list) else events).passed.set()
        await quickly(task)


async def test_torch_without_streams(torch: Torch) -> None:
    assert await quickly(aiocuda.wait(torch.Tensor("mps", 0))) is None
    with pytest.raises(InvalidTypeError, match=r"not a torch\..*Tensor of shape \(3,\)"):
        aiocuda.wait(torch.Tensor("meta", None))


async def test_torch_where_cuda_cannot_be_used(torch: Torch, without_cuda: None) -> None:
    event = torch.cuda.Event()
    task = asyncio.ensure_future(aiocuda.wait([event, torch.Tensor()]).wait())
    await turns()
    assert not task.done()
    for each in (event, torch.stream.recorded[0]):
        each.passed.set()
    await quickly(task)


async def test_stream_without_methods_where_cuda_cannot_be_used(without_cuda: None) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, STREAM)

    with pytest.raises(UnsupportedError, match="CUDA cannot be used: no NVIDIA driver"):
        aiocuda.wait(Stream())


async def test_where_cuda_cannot_be_used_is_found_once(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The real search: the driver of this process, too old here. There is no `HostDriverWarning`."""
    fake.version(11000)
    monkeypatch.setattr(_wait, "_cuda", [])
    monkeypatch.setattr(CudaDriver, "_made", {"cuda": CudaDriver(fake.path)})
    thing = Passing()
    thing.passed.set()
    stream: Any = type("Stream", (Passing,), {"__cuda_stream__": lambda self: (0, STREAM)})()
    stream.passed.set()
    for _ in range(2):
        await quickly(aiocuda.wait([thing, stream]))
    assert "too old" in _wait._cuda[0]
    assert not recwarn.list
    fake.version(13000)


# -- CuPy --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    @of("cupy")
    class ndarray:  # noqa: N801 - CuPy's name
        device = SimpleNamespace(id=1)
        shape = (3,)

    @of("cupy.cuda.stream")
    class Stream:
        def __init__(self, handle: int = STREAM, device: int = -1) -> None:
            self.ptr, self.device_id = handle, device
            self.synchronized = threading.Event()

        def synchronize(self) -> None:
            self.synchronized.wait()

    @of("cupy.cuda.stream")
    class Event:
        ptr = EVENT

    made = SimpleNamespace(
        ndarray=ndarray,
        cuda=SimpleNamespace(
            Stream=Stream, ExternalStream=type("ExternalStream", (Stream,), {}), Event=Event,
            runtime=SimpleNamespace(getDevice=lambda: 0, is_hip=False),
            get_current_stream=lambda index=0: Stream(CURRENT, index),
        ),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


async def test_cupy(driver: CudaDriver, fake: Fake, cupy: SimpleNamespace) -> None:
    assert await recorded(driver, fake, cupy.cuda.Stream()) == (STREAM, [0])
    fake.forget()
    fake.value("cuStreamGetDevice", 1)
    assert await recorded(driver, fake, cupy.ndarray()) == (CURRENT, [0, 1])
    fake.forget()
    await quickly(aiocuda.wait(cupy.cuda.Event()))
    assert fake.only("cuEventQuery").arguments[0] == EVENT


async def test_cupy_on_another_accelerator(cupy: SimpleNamespace) -> None:
    cupy.cuda.runtime.is_hip = True
    stream = cupy.cuda.Stream()
    task = asyncio.ensure_future(aiocuda.wait(stream).wait())
    await turns()
    assert not task.done()
    stream.synchronized.set()
    await quickly(task)


# -- numba-cuda, cuda.core, arrays -------------------------------------------------------------------------------------


async def test_numba(driver: CudaDriver, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    @of("numba.cuda.cudadrv.driver")
    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __int__(self) -> int:
            return self.handle

    @of("numba.cuda.cudadrv.driver")
    class Event:
        def __init__(self, handle: object) -> None:
            self.handle = handle

    @of("numba.cuda.cudadrv.devicearray")
    class Array:
        def __init__(self, stream: object) -> None:
            self.stream = stream

    cuda = SimpleNamespace(
        get_current_device=lambda: SimpleNamespace(id=0), is_cuda_array=lambda x: isinstance(x, Array),
        default_stream=lambda: Stream(0), cudadrv=SimpleNamespace(driver=SimpleNamespace(Stream=Stream, Event=Event)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "numba.cuda", cuda)
    for thing, handle in ((Stream(STREAM), STREAM), (Array(Stream(CURRENT)), CURRENT), (Array(0), 1)):
        fake.forget()
        assert await recorded(driver, fake, thing) == (handle, [0])
    for event in (ctypes.c_void_p(EVENT), EVENT):
        fake.forget()
        await quickly(aiocuda.wait(Event(event)))
        assert fake.only("cuEventQuery").arguments[0] == EVENT


async def test_cuda_core(driver: CudaDriver, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    @of("cuda.core._event")
    class Event:
        handle = EVENT
        device = SimpleNamespace(device_id=1)

    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Event=Event))
    await quickly(aiocuda.wait(Event()))
    assert fake.only("cuEventQuery").arguments[0] == EVENT
    assert list(driver.open_devices) == [1]


async def test_array_that_names_its_stream(driver: CudaDriver, fake: Fake) -> None:
    class Array:
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            return {"shape": (1,), "typestr": "<f4", "data": (8, False), "version": 3, "stream": CURRENT}

    assert await recorded(driver, fake, Array()) == (CURRENT, [0])
