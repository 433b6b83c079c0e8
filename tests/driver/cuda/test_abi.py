from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver as cuda

from aiocuda.driver.cuda import _abi

_CONSTANTS = sorted(
    name
    for name, value in vars(_abi).items()
    if name.startswith(("CU_", "CUDA_")) and not isinstance(value, type)  # a few structures are called so, too
)
_ENUMS = [kind for kind in vars(cuda).values() if isinstance(kind, type) and hasattr(kind, "__members__")]


@pytest.mark.parametrize("name", _CONSTANTS)
def test_constant_is_cudas(name: str) -> None:
    known = {int(kind.__members__[name]) for kind in _ENUMS if name in kind.__members__}
    if name.startswith("CU_MEMHOST"):
        known = {int(getattr(cuda, name))}
    assert known == {getattr(_abi, name)}


def test_launch_configuration_lies_as_cudas_does() -> None:
    theirs = cuda.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 1, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 4, 5, 6
    theirs.sharedMemBytes, theirs.hStream = 7, 0x7F00_0000_1234
    ours = _abi.CUlaunchConfig(1, 2, 3, 4, 5, 6, 7, 0x7F00_0000_1234, None, 0)
    size = ctypes.sizeof(_abi.CUlaunchConfig)
    assert size == 56
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)


def test_pool_properties_lie_as_cudas_do() -> None:
    theirs = cuda.CUmemPoolProps()
    theirs.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 3
    theirs.maxSize, theirs.usage = 5, 6
    ours = _abi.CUmemPoolProps(allocType=1, location=_abi.CUmemLocation(1, 3), maxSize=5, usage=6)
    size = ctypes.sizeof(_abi.CUmemPoolProps)
    assert size == 88
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)


def test_access_description_lies_as_cudas_does() -> None:
    theirs = cuda.CUmemAccessDesc()
    theirs.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 1
    theirs.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ours = _abi.CUmemAccessDesc(location=_abi.CUmemLocation(1, 1), flags=3)
    size = ctypes.sizeof(_abi.CUmemAccessDesc)
    assert size == 12
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)


def test_kernel_node_lies_as_cudas_does() -> None:
    theirs = cuda.CUDA_KERNEL_NODE_PARAMS()
    theirs.func, theirs.sharedMemBytes = 0x7F00_0000_0010, 7
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 1, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 4, 5, 6
    theirs.kern, theirs.ctx = 0x7F00_0000_0020, 0x7F00_0000_0030
    ours = _abi.CUDA_KERNEL_NODE_PARAMS(
        0x7F00_0000_0010, 1, 2, 3, 4, 5, 6, 7, None, None, 0x7F00_0000_0020, 0x7F00_0000_0030
    )
    size = ctypes.sizeof(_abi.CUDA_KERNEL_NODE_PARAMS)
    assert size == 72
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)
    # `kernelParams`, which cuda-bindings packs by itself, stands between `sharedMemBytes` and `extra`.
    assert _abi.CUDA_KERNEL_NODE_PARAMS.kernelParams.offset == 40


def test_copy_node_lies_as_cudas_does() -> None:
    theirs = cuda.CUDA_MEMCPY3D()
    theirs.srcXInBytes, theirs.srcY, theirs.srcZ, theirs.srcLOD = 1, 2, 3, 4
    theirs.srcMemoryType, theirs.srcHost = cuda.CUmemorytype.CU_MEMORYTYPE_HOST, 0x1000
    theirs.srcDevice, theirs.srcPitch, theirs.srcHeight = 5, 6, 7
    theirs.dstXInBytes, theirs.dstY, theirs.dstZ, theirs.dstLOD = 8, 9, 10, 11
    theirs.dstMemoryType, theirs.dstHost = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE, 0x2000
    theirs.dstDevice, theirs.dstPitch, theirs.dstHeight = 12, 13, 14
    theirs.WidthInBytes, theirs.Height, theirs.Depth = 15, 16, 17
    ours = _abi.CUDA_MEMCPY3D(
        *(1, 2, 3, 4, _abi.CU_MEMORYTYPE_HOST, 0x1000, 5, None, None, 6, 7),
        *(8, 9, 10, 11, _abi.CU_MEMORYTYPE_DEVICE, 0x2000, 12, None, None, 13, 14),
        *(15, 16, 17),
    )
    size = ctypes.sizeof(_abi.CUDA_MEMCPY3D)
    assert size == 200
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)


def test_fill_node_lies_as_cudas_does() -> None:
    theirs = cuda.CUDA_MEMSET_NODE_PARAMS()
    theirs.dst, theirs.pitch, theirs.value, theirs.elementSize, theirs.width, theirs.height = 1, 2, 3, 4, 5, 6
    ours = _abi.CUDA_MEMSET_NODE_PARAMS(1, 2, 3, 4, 5, 6)
    size = ctypes.sizeof(_abi.CUDA_MEMSET_NODE_PARAMS)
    assert size == 40
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)


def test_instantiation_lies_as_cudas_does() -> None:
    theirs = cuda.CUDA_GRAPH_INSTANTIATE_PARAMS()
    theirs.flags, theirs.hUploadStream, theirs.hErrNode_out = 2, 0x7F00_0000_0010, 0x7F00_0000_0020
    theirs.result_out = cuda.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
    ours = _abi.CUDA_GRAPH_INSTANTIATE_PARAMS(2, 0x7F00_0000_0010, 0x7F00_0000_0020, 2)
    size = ctypes.sizeof(_abi.CUDA_GRAPH_INSTANTIATE_PARAMS)
    assert size == 32
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)
