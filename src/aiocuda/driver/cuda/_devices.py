"""The methods about devices."""

from __future__ import annotations

import ctypes
from typing import Final

from ..._base._types import DeviceProperties
from ...errors import InvalidArgumentError, UnsupportedError
from . import _abi
from ._core import Context, Core, OpenDevice
from ._library import Library, version_text

__all__ = ["CudaDevices"]

_PACKAGES: Final = ("cuda-python", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc")


class CudaDevices(Core):
    """`aiocuda.driver.protocol.Devices`."""

    @property
    def name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        """Return the number of devices. The first call loads and initialises libcuda, and **may block**."""
        self.load_library()
        count = ctypes.c_int()
        code = self.release_gil.cuDeviceGetCount(ctypes.byref(count))
        self.check_code("cuDeviceGetCount", code)
        self.call_count += 1
        return count.value

    def device_open(self, device: int) -> DeviceProperties:
        """Retain the primary context, create a memory pool, and return the properties. **May block.**"""
        library = self.load_library()
        with self._open_lock:
            record = self.open_devices.get(device)
            if record is None:
                record = self.open_devices[device] = self._open(library, device)
        return record.properties

    def _open(self, library: Library, device: int) -> OpenDevice:
        count = self.device_count()
        if not 0 <= device < count:
            raise InvalidArgumentError(f"device {device}: there are {count} CUDA devices, from 0 on", device=device)
        out = ctypes.c_int()
        code = self.release_gil.cuDeviceGet(ctypes.byref(out), device)
        self.check_code("cuDeviceGet", code, device)
        handle = out.value
        properties = self._properties(library, device, handle)
        primary = ctypes.c_uint64()
        code = self.release_gil.cuDevicePrimaryCtxRetain(ctypes.byref(primary), handle)
        self.check_code("cuDevicePrimaryCtxRetain", code, device)
        context = Context(self, device, primary.value)
        try:
            pool = self._make_pool(device)
        except BaseException:
            self.release_gil.cuDevicePrimaryCtxRelease(handle)
            raise
        return OpenDevice(device, handle, primary.value, context, pool, properties)

    def _make_pool(self, device: int) -> int:
        properties = _abi.CUmemPoolProps(
            allocType=_abi.CU_MEM_ALLOCATION_TYPE_PINNED,
            location=_abi.CUmemLocation(_abi.CU_MEM_LOCATION_TYPE_DEVICE, device),
        )
        pool = ctypes.c_uint64()
        code = self.release_gil.cuMemPoolCreate(ctypes.byref(pool), ctypes.byref(properties))
        self.check_code("cuMemPoolCreate", code, device)
        keep = ctypes.c_uint64(2**64 - 1)  # by default a pool releases unused memory at every synchronisation
        # By default, CUDA may make an allocation wait for another stream's free. A third stream could then not use the
        # memory immediately, although the allocating stream is idle.
        waits = ctypes.c_int(0)
        for which, value in (
            (_abi.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, waits),
            (_abi.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, keep),
        ):
            code = self.release_gil.cuMemPoolSetAttribute(pool.value, which, ctypes.byref(value))
            if code:
                self.release_gil.cuMemPoolDestroy(pool.value)
                self.fail("cuMemPoolSetAttribute", code, device)
        return pool.value

    def _properties(self, library: Library, device: int, handle: int) -> DeviceProperties:
        def attribute(which: int) -> int:
            value = ctypes.c_int()
            code = self.release_gil.cuDeviceGetAttribute(ctypes.byref(value), which, handle)
            self.check_code("cuDeviceGetAttribute", code, device)
            return value.value

        name = ctypes.create_string_buffer(256)
        code = self.release_gil.cuDeviceGetName(name, len(name), handle)
        self.check_code("cuDeviceGetName", code, device)
        shown = name.value.decode(errors="replace")
        if not attribute(_abi.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED):
            raise UnsupportedError(f"device {device} ({shown}) has no stream-ordered memory: use driver='host'")
        total = ctypes.c_uint64()
        code = self.release_gil.cuDeviceTotalMem(ctypes.byref(total), handle)
        self.check_code("cuDeviceTotalMem", code, device)
        return DeviceProperties(
            name=shown,
            compute_capability=(
                attribute(_abi.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                attribute(_abi.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            total_memory=total.value,
            multiprocessors=attribute(_abi.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            max_grid=(
                attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
                attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
                attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
            ),
            max_block=(
                attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
                attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
                attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
            ),
            max_threads_per_block=attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
            max_shared_bytes=attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            default_shared_bytes=attribute(_abi.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
            copy_engines=attribute(_abi.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
            hardware_queues=library.hardware_queues,
            managed_memory=bool(attribute(_abi.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)),
            concurrent_managed_access=bool(attribute(_abi.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)),
            unified_addressing=bool(attribute(_abi.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)),
            memory_pools=bool(attribute(_abi.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)),
        )

    def versions(self) -> dict[str, str]:
        import importlib.metadata  # takes 20 ms

        found = {"cuda-driver": version_text(self.load_library().version)}
        for package in _PACKAGES:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue  # the package's other form is installed, or its extra is not
        return found

    def close(self) -> None:
        """Do nothing: there is one driver per process, and other devices may use it."""
