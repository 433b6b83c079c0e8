"""Copies take and fill host memory of other libraries that comes by DLPack, such as CPU tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import (
    AsyncCoordinator,
    Device,
    InvalidArgumentError,
    InvalidTypeError,
    PinnedBuffer,
    StaleHandleError,
    Stream,
    WrongDeviceError,
)
from aiocuda.device._resources import resources_of
from aiocuda.memory.interchange import _dlpack
from aiocuda.memory.interchange._host_arrays import as_source, as_target
from tests.helpers import Latch

pytestmark = pytest.mark.asyncio

ROCM = 10


class Tensor:
    """A tensor of another library in host memory. It has no buffer protocol, as PyTorch's has none."""

    def __init__(self, array: Any, kind: int = _dlpack.CPU, version: tuple[int, int] | None = (1, 0)) -> None:
        self.array = np.asarray(array)
        self.kind = kind
        self.version = version

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: object = None, max_version: object = None) -> Any:
        capsule = self.array.__dlpack__(max_version=self.version)
        _dlpack.set_device(capsule, (self.kind, 0))
        return capsule


class OldTensor(Tensor):
    """A tensor of a library that implements DLPack before 1.0. Its capsule has no read-only flag."""

    def __init__(self, array: Any) -> None:
        super().__init__(array, version=None)

    def __dlpack__(self, stream: object = None) -> Any:  # type: ignore[override]
        return super().__dlpack__()


MAKE: list[Callable[[Any], Any]] = [Tensor, OldTensor, lambda array: Tensor(array, _dlpack.CUDA_HOST)]
made = pytest.mark.parametrize("make", MAKE, ids=["tensor", "before 1.0", "pinned"])


@made
async def test_there_and_back(stream: Stream, make: Callable[[Any], Any]) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = make(x)
    buffer = await stream.upload(tensor)
    assert (buffer.shape, buffer.dtype) == (x.shape, x.dtype)
    second = stream.empty_like(tensor)
    assert (second.shape, second.dtype) == (x.shape, x.dtype)
    stream.copy(second, tensor)
    assert (await stream.download(second) == x).all()
    out, target = make(np.zeros_like(x)), make(np.zeros_like(x))
    result: Any = await stream.download(buffer, out)
    assert result is out
    await stream.copy(target, buffer)
    assert (out.array == x).all()
    assert (target.array == x).all()


@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.array(5), np.array([True, False]), np.arange(2) * 1j])
async def test_shapes_and_dtypes(stream: Stream, array: Any) -> None:
    result = await stream.download(await stream.upload(Tensor(array)))
    assert (result.shape, result.dtype) == (array.shape, array.dtype)
    assert (result == array).all()


async def test_bfloat16(stream: Stream) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    class Brain(Tensor):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = self.array.view(np.uint16).__dlpack__(max_version=(1, 0))
            _dlpack._struct(capsule).dl_tensor.dtype.code = _dlpack._BFLOAT
            return capsule

    x = np.array([1.5, -2], ml_dtypes.bfloat16)
    result = await stream.download(await stream.upload(Brain(x)))
    assert result.dtype == x.dtype
    assert (result == x).all()


async def test_producer_is_held_until_the_operation_is_done(stream: Stream, latch: Latch) -> None:
    for verb in (stream.upload, lambda tensor: stream.copy(stream.empty(4), tensor)):
        for make in MAKE:
            array = np.ones(4, np.float32)
            gone = weakref.ref(array)
            tensor = make(array)
            del array
            with Latch(stream.device) as held:
                held.hold(stream)
                operation = verb(tensor)
                del tensor
                gc.collect()
                assert gone() is not None
            await operation
            del operation
            await stream.synchronize()
            gc.collect()
            assert gone() is None


@pytest.mark.gpu
async def test_device_reads_and_writes_pinned_memory_directly() -> None:
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as stream:
        memory = await device.pinned(4)
        memory[:] = 1
        pinned: Any
        pinned, pageable = (Tensor(np.asarray(memory), kind) for kind in (_dlpack.CUDA_HOST, _dlpack.CPU))
        for of in (as_source, as_target):  # a `PinnedBuffer` is copied without staging
            assert isinstance(of(pinned, resources_of(device).pinned_pool), PinnedBuffer)
            assert not isinstance(of(pageable, resources_of(device).pinned_pool), PinnedBuffer)
        assert await stream.download(await stream.upload(pinned), pinned) is pinned
        assert (memory == 1).all()


async def test_coordinator_takes_it_too(device: Device) -> None:
    x = np.arange(4, dtype=np.float32)
    async with AsyncCoordinator(device) as coordinator:
        out: Any = Tensor(np.zeros_like(x))
        await coordinator.download(coordinator.upload(Tensor(x)), out)
    assert (out.array == x).all()


@made
async def test_memory_that_is_not_contiguous_is_refused(stream: Stream, make: Callable[[Any], Any]) -> None:
    tensor = make(np.zeros((4, 4), np.float32)[:, ::2])
    with pytest.raises(InvalidArgumentError, match="the source array must be C-contiguous"):
        stream.upload(tensor)
    with pytest.raises(InvalidArgumentError, match="the target array must be C-contiguous"):
        stream.copy(tensor, stream.empty((4, 2)))


async def test_read_only_memory_is_a_source_and_no_target(stream: Stream) -> None:
    fixed = np.ones(4, np.float32)
    fixed.flags.writeable = False
    buffer = await stream.upload(Tensor(fixed))
    with pytest.raises(InvalidArgumentError, match="is read-only: pass a writable one"):
        stream.copy(Tensor(fixed), buffer)
    with pytest.raises(InvalidArgumentError, match="is read-only: pass a writable one"):
        stream.download(buffer, Tensor(fixed))  # type: ignore[arg-type]


class Raises(Tensor):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


class RaisesDevice(Tensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        raise RuntimeError("no device")


class NoDevice(Tensor):
    __dlpack_device__ = 3  # type: ignore[assignment]


class NoCapsule(Tensor):
    def __dlpack__(self, **options: Any) -> Any:
        return 7


class Used(Tensor):
    def __dlpack__(self, **options: Any) -> Any:
        capsule = super().__dlpack__()
        _dlpack.take(capsule)
        return capsule


class Lies(Tensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CPU, 0


BAD = [
    (Raises, _dlpack.CPU, InvalidArgumentError, r"__dlpack__ of this Raises fails: .* use tensor\.detach\(\)"),
    (RaisesDevice, _dlpack.CPU, InvalidArgumentError, "__dlpack_device__ of this RaisesDevice gives no device"),
    (NoDevice, _dlpack.CPU, InvalidArgumentError, "__dlpack_device__ of this NoDevice gives no device"),
    (NoCapsule, _dlpack.CPU, InvalidTypeError, "not a capsule"),
    (Used, _dlpack.CPU, StaleHandleError, "capsule has been used"),
    (Lies, _dlpack.CUDA, WrongDeviceError, "its capsule is on CUDA"),
    (Tensor, ROCM, WrongDeviceError, r"Tensor on ROCm .*bring it to host memory first"),
    (Tensor, _dlpack.CUDA, InvalidTypeError, r"pass the buffer that stream\.adopt\(x\) makes of it"),
    (Tensor, _dlpack.CUDA_MANAGED, InvalidTypeError, r"pass the buffer that stream\.adopt\(x\) makes of it"),
]


@pytest.mark.parametrize(("kind", "place", "error", "words"), BAD, ids=[f"{row[0].__name__}-{row[1]}" for row in BAD])
async def test_object_that_cannot_be_copied_is_refused(
    stream: Stream, kind: type[Tensor], place: int, error: type[Exception], words: str
) -> None:
    tensor = kind(np.zeros(4, np.float32), place)
    buffer = stream.empty(4)
    before = stream.statistics().operations
    for verb in (stream.upload, lambda tensor: stream.copy(buffer, tensor), lambda tensor: stream.copy(tensor, buffer)):
        with pytest.raises(error, match=words) as caught:
            verb(tensor)
        assert type(caught.value) is error
    assert stream.statistics().operations == before


async def test_adopt_and_upload_send_to_each_other_only_what_the_other_takes(stream: Stream) -> None:
    tensor = Tensor(np.arange(3.0))
    with pytest.raises(WrongDeviceError, match=r"bring it to the device by `await stream\.upload\(x\)`"):
        stream.adopt(tensor)
    assert (await stream.download(await stream.upload(tensor)) == tensor.array).all()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
async def test_tensors_of_pytorch(pinned: bool) -> None:
    torch = pytest.importorskip("torch")
    async with aiocuda.open_device(driver="cuda") as device, device.stream() as stream:
        for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
            tensor = torch.arange(24).reshape(4, 6).to(dtype)
            out = torch.zeros_like(tensor)
            if pinned:
                tensor, out = tensor.pin_memory(), out.pin_memory()
            buffer = await stream.upload(tensor)
            assert await stream.download(buffer, out) is out
            assert torch.equal(out, tensor)
        with pytest.raises(InvalidArgumentError, match="C-contiguous"):
            stream.upload(torch.zeros(4, 6).T)
        with pytest.raises(InvalidArgumentError, match="detach"):
            stream.upload(torch.zeros(4, requires_grad=True))
        with pytest.raises(InvalidTypeError, match="adopt"):
            stream.upload(torch.zeros(4, device="cuda"))
