from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver as cuda

from aiocuda.driver.cuda import abi

_CONSTANTS = sorted(name for name in vars(abi) if name.startswith(("CU_", "CUDA_")))
_ENUMS = [kind for kind in vars(cuda).values() if isinstance(kind, type) and hasattr(kind, "__members__")]


@pytest.mark.parametrize("name", sorted(set(_CONSTANTS) - {"CU_EVENT_WAIT_DEFAULT"}))
def test_constant_is_cudas(name: str) -> None:
    known = {int(kind.__members__[name]) for kind in _ENUMS if name in kind.__members__}
    if name.startswith("CU_MEMHOST"):
        known = {int(getattr(cuda, name))}
    assert known == {getattr(abi, name)}


def test_launch_configuration_lies_as_cudas_does() -> None:
    theirs = cuda.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 1, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 4, 5, 6
    theirs.sharedMemBytes, theirs.hStream = 7, 0x7F00_0000_1234
    ours = abi.CUlaunchConfig(1, 2, 3, 4, 5, 6, 7, 0x7F00_0000_1234, None, 0)
    size = ctypes.sizeof(abi.CUlaunchConfig)
    assert size == 56
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)


def test_pool_properties_lie_as_cudas_do() -> None:
    theirs = cuda.CUmemPoolProps()
    theirs.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 3
    theirs.maxSize, theirs.usage = 5, 6
    ours = abi.CUmemPoolProps(allocType=1, location=abi.CUmemLocation(1, 3), maxSize=5, usage=6)
    size = ctypes.sizeof(abi.CUmemPoolProps)
    assert size == 88
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)


def test_access_description_lies_as_cudas_does() -> None:
    theirs = cuda.CUmemAccessDesc()
    theirs.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 1
    theirs.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ours = abi.CUmemAccessDesc(location=abi.CUmemLocation(1, 1), flags=3)
    size = ctypes.sizeof(abi.CUmemAccessDesc)
    assert size == 12
    assert ctypes.string_at(int(theirs.getPtr()), size) == bytes(ours)
