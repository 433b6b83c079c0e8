"""Structures and constants of ``cuda.h``, by their names there. Tests compare them with cuda-bindings."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = [
    "CUDA_GRAPH_INSTANTIATE_PARAMS",
    "CUDA_KERNEL_NODE_PARAMS",
    "CUDA_MEMCPY3D",
    "CUDA_MEMSET_NODE_PARAMS",
    "CUlaunchConfig",
    "CUmemAccessDesc",
    "CUmemLocation",
    "CUmemPoolProps",
]

# CUresult: the codes that this package distinguishes. `_codes` classifies all of them.
CUDA_ERROR_INVALID_VALUE: Final = 1
CUDA_ERROR_NO_DEVICE: Final = 100
CUDA_ERROR_INVALID_HANDLE: Final = 400
CUDA_ERROR_NOT_FOUND: Final = 500
CUDA_ERROR_NOT_READY: Final = 600
CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: Final = 704

CU_GET_PROC_ADDRESS_LEGACY_STREAM: Final = 1

CU_STREAM_NON_BLOCKING: Final = 1
CU_EVENT_WAIT_DEFAULT: Final = 0
CU_EVENT_DISABLE_TIMING: Final = 2
CU_STREAM_CAPTURE_MODE_RELAXED: Final = 2

CU_MEMHOSTALLOC_PORTABLE: Final = 1
CU_MEMHOSTREGISTER_PORTABLE: Final = 1
CU_MEM_ATTACH_GLOBAL: Final = 1
CU_MEM_ADVISE_SET_READ_MOSTLY: Final = 1
CU_MEM_ADVISE_UNSET_READ_MOSTLY: Final = 2
CU_MEM_ADVISE_SET_PREFERRED_LOCATION: Final = 3
CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: Final = 4
CU_MEM_ADVISE_SET_ACCESSED_BY: Final = 5
CU_MEM_ADVISE_UNSET_ACCESSED_BY: Final = 6
CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: Final = 1
CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: Final = 2
CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: Final = 3
CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: Final = 4
CU_MEMORYTYPE_HOST: Final = 1
CU_MEMORYTYPE_DEVICE: Final = 2
CU_MEM_ALLOCATION_TYPE_PINNED: Final = 1
CU_MEM_LOCATION_TYPE_DEVICE: Final = 1
CU_MEM_LOCATION_TYPE_HOST: Final = 2
CU_MEM_ACCESS_FLAGS_PROT_READWRITE: Final = 3
CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: Final = 3
CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: Final = 4
CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: Final = 5
CU_MEMPOOL_ATTR_USED_MEM_CURRENT: Final = 7

CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD: Final = 2
CU_POINTER_ATTRIBUTE_MEMORY_TYPE: Final = 2
CU_POINTER_ATTRIBUTE_IS_MANAGED: Final = 8
CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: Final = 9
CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: Final = 11
CU_POINTER_ATTRIBUTE_RANGE_SIZE: Final = 12

CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: Final = 8

CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: Final = 1
CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: Final = 2
CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: Final = 3
CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: Final = 4
CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: Final = 5
CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: Final = 6
CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: Final = 7
CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: Final = 8
CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: Final = 16
CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: Final = 40
CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: Final = 41
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: Final = 75
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: Final = 76
CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: Final = 83
CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: Final = 89
CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: Final = 97
CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: Final = 115


_EXTENT: Final = tuple(
    (name, ctypes.c_uint)
    for name in ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")
)


class CUlaunchConfig(ctypes.Structure):
    """The parameters of ``cuLaunchKernelEx``, without those of the kernel."""

    _fields_ = [
        *_EXTENT,
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    ]


class CUmemLocation(ctypes.Structure):
    """A device or the host. ``cuMemPrefetchAsync`` takes it by value."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class CUmemAccessDesc(ctypes.Structure):
    """The access of one location to a pool's memory."""

    _fields_ = [("location", CUmemLocation), ("flags", ctypes.c_int)]


class CUmemPoolProps(ctypes.Structure):
    """The parameters of ``cuMemPoolCreate``."""

    _fields_ = [
        ("allocType", ctypes.c_int),
        ("handleTypes", ctypes.c_int),
        ("location", CUmemLocation),
        ("win32SecurityAttributes", ctypes.c_void_p),
        ("maxSize", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class CUDA_KERNEL_NODE_PARAMS(ctypes.Structure):  # noqa: N801 - CUDA's name; this is its second version
    """A launch as a node of a graph."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *_EXTENT,
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


_SIDE: Final = (
    ("XInBytes", ctypes.c_size_t),
    ("Y", ctypes.c_size_t),
    ("Z", ctypes.c_size_t),
    ("LOD", ctypes.c_size_t),
    ("MemoryType", ctypes.c_int),
    ("Host", ctypes.c_void_p),
    ("Device", ctypes.c_uint64),
    ("Array", ctypes.c_void_p),
    ("Reserved", ctypes.c_void_p),
    ("Pitch", ctypes.c_size_t),
    ("Height", ctypes.c_size_t),
)


class CUDA_MEMCPY3D(ctypes.Structure):  # noqa: N801 - CUDA's name
    """A copy as a node of a graph. A copy of contiguous bytes has height and depth 1."""

    _fields_ = [
        *(("src" + name, kind) for name, kind in _SIDE),
        *(("dst" + name, kind) for name, kind in _SIDE),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    ]


class CUDA_MEMSET_NODE_PARAMS(ctypes.Structure):  # noqa: N801 - CUDA's name
    """A fill as a node of a graph."""

    _fields_ = [
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class CUDA_GRAPH_INSTANTIATE_PARAMS(ctypes.Structure):  # noqa: N801 - CUDA's name
    """The parameters and results of ``cuGraphInstantiateWithParams``."""

    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("hUploadStream", ctypes.c_void_p),
        ("hErrNode_out", ctypes.c_void_p),
        ("result_out", ctypes.c_int),
    ]
