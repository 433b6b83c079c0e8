"""The calls of CUDA that may wait for running kernels, and some that do not, prepared on the bare driver.

A call uses what an earlier one of the same mapping has made. Each sets the context of its thread first.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from .raw import RawCuda

__all__ = ["peer_calls", "waiting_calls"]

Calls: TypeAlias = dict[str, Callable[[], object]]

MIB = 1 << 20

#: Streams that are made in one call: the 36th of a process waits.
STREAMS = 60


def waiting_calls(raw: RawCuda, scale: float) -> Calls:
    """Return the calls by name, in the order in which they are to be made. ``scale`` is a factor for sizes."""
    calls = _kernels(raw) | _host_memory(raw, scale) | _device_memory(raw, scale) | _others(raw)
    return _in_context(raw, calls)


def _in_context(raw: RawCuda, calls: Calls) -> Calls:
    context = raw.ask("cuCtxGetCurrent")

    def wrapped(call: Callable[[], object]) -> Callable[[], object]:
        def on_thread() -> None:
            raw.ask("cuCtxSetCurrent", context)
            call()

        return on_thread

    return {name: wrapped(call) for name, call in calls.items()}


def _kernels(raw: RawCuda) -> Calls:
    ask, made = raw.ask, dict[str, Any]()
    module, library, other = (raw.cubin(_new(number)) for number in range(3))
    stream = raw.stream()
    loaded = ask("cuLibraryGetKernel", ask("cuLibraryLoadData", other, [], [], 0, [], [], 0), b"new2")

    def keep(name: str, call: str, *arguments: Any) -> Callable[[], object]:
        return lambda: made.update({name: ask(call, *arguments)})

    def launch() -> None:
        arguments = ((0,), (ctypes.c_void_p,))
        function = raw.driver.CUfunction(int(loaded))
        ask("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream.handle, arguments, 0)

    return {
        "module_load": keep("module", "cuModuleLoadData", module),
        "module_unload": lambda: ask("cuModuleUnload", made["module"]),
        "library_load": keep("library", "cuLibraryLoadData", library, [], [], 0, [], [], 0),
        "library_kernel": lambda: made.update(kernel=ask("cuLibraryGetKernel", made["library"], b"new1")),
        "kernel_function": lambda: ask("cuKernelGetFunction", made["kernel"]),
        "library_unload": lambda: ask("cuLibraryUnload", made["library"]),
        "first_launch": launch,
    }


def _new(number: int) -> str:
    return f'extern "C" __global__ void new{number}(int *x) {{ if (x) *x = {number}; }}'


def _host_memory(raw: RawCuda, scale: float) -> Calls:
    ask, small, large, made = raw.ask, MIB, round(256 * MIB * scale), dict[str, Any]()
    regions = [mmap.mmap(-1, large) for _ in range(2)]
    np.frombuffer(regions[1], np.uint8)[:: mmap.PAGESIZE] = 1
    untouched, touched = (ctypes.addressof(ctypes.c_char.from_buffer(region)) for region in regions)
    made["regions"] = regions  # they live as long as the calls

    def allocate(name: str, nbytes: int) -> Callable[[], object]:
        return lambda: made.update({name: ask("cuMemHostAlloc", nbytes, 0)})

    calls: Calls = {
        "host_alloc_1mb": allocate("small", small),
        "host_free_1mb": lambda: ask("cuMemFreeHost", made["small"]),
        "host_alloc_256mb": allocate("large", large),
        "host_free_256mb": lambda: ask("cuMemFreeHost", made["large"]),
        "host_register_256mb": lambda: ask("cuMemHostRegister", untouched, large, 0),
        "host_register_256mb_touched": lambda: ask("cuMemHostRegister", touched, large, 0),
        "host_unregister": lambda: ask("cuMemHostUnregister", untouched),
        "host_unregister_touched": lambda: ask("cuMemHostUnregister", touched),
    }
    pool = _pool(raw, "HOST")
    return calls | ({} if pool is None else _pool_calls(raw, pool, "host_pool", "256mb", large))


def _device_memory(raw: RawCuda, scale: float) -> Calls:
    ask, made = raw.ask, dict[str, Any]()
    calls: Calls = {
        "mem_alloc": lambda: made.update(plain=ask("cuMemAlloc", MIB)),
        "mem_free": lambda: ask("cuMemFree", made["plain"]),
        "managed_alloc": lambda: made.update(managed=ask("cuMemAllocManaged", MIB, 1)),
        "managed_free": lambda: ask("cuMemFree", made["managed"]),
    }
    return calls | _pool_calls(raw, _pool(raw, "DEVICE"), "pool", "4gb", round(4096 * MIB * scale))


def _pool(raw: RawCuda, place: str) -> Any:
    """Return a pool of the device or of the host, which the device may access; None if the driver has no such pools."""
    driver, properties, access = raw.driver, raw.driver.CUmemPoolProps(), raw.driver.CUmemAccessDesc()
    device = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location = getattr(driver.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{place}", None)
    if location is None:
        return None
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.handleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    properties.location.type, properties.location.id = location, 0
    try:
        pool = raw.ask("cuMemPoolCreate", properties)
    except RuntimeError:
        return None
    if place != "DEVICE":
        access.location.type, access.location.id = device, 0
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        raw.ask("cuMemPoolSetAccess", pool, [access], 1)
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    raw.ask("cuMemPoolSetAttribute", pool, threshold, driver.cuuint64_t(2**64 - 1))
    return pool


def _pool_calls(raw: RawCuda, pool: Any, name: str, size: str, nbytes: int) -> Calls:
    ask, stream, made = raw.ask, raw.stream(), list[Any]()

    def allocate() -> None:
        made.append(ask("cuMemAllocFromPoolAsync", nbytes, pool, stream.handle))

    def free() -> None:
        ask("cuMemFreeAsync", made.pop(), stream.handle)

    def trim() -> None:
        free()
        stream.sync()
        ask("cuMemPoolTrimTo", pool, 0)

    calls: Calls = {f"{name}_alloc_{size}": allocate, f"{name}_free": free, f"{name}_alloc_again": allocate}
    return calls | {f"{name}_trim": trim}


def _others(raw: RawCuda) -> Calls:
    ask, stream, made = raw.ask, raw.stream(), dict[str, Any]()
    memory, array = ask("cuMemAlloc", MIB), np.ones(1 << 10, np.uint8)
    ask("cuStreamBeginCapture", stream.handle, raw.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    raw.fill(stream, int(memory), 1 << 10)
    graph = ask("cuStreamEndCapture", stream.handle)

    def streams() -> None:
        for _ in range(STREAMS):
            ask("cuStreamCreateWithPriority", 1, 0)

    return {
        "event_create": lambda: ask("cuEventCreate", 2),
        "pageable_copy_1kb": lambda: ask("cuMemcpyHtoDAsync", memory, array.ctypes.data, array.nbytes, stream.handle),
        "graph_instantiate": lambda: made.update(graph=ask("cuGraphInstantiate", graph, 0)),
        "graph_launch": lambda: ask("cuGraphLaunch", made["graph"], stream.handle),
        f"streams_{STREAMS}": streams,
    }


def peer_calls(raw: RawCuda) -> Calls:
    """Return the calls that the first copy from the second device to the first one makes."""
    driver, access = raw.driver, raw.driver.CUmemAccessDesc()
    other = raw.ask("cuDevicePrimaryCtxRetain", raw.ask("cuDeviceGet", 1))
    pool = raw.ask("cuDeviceGetDefaultMemPool", raw.ask("cuDeviceGet", 0))
    access.location.type, access.location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 1
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    calls: Calls = {
        "enable_peer_access": lambda: raw.ask("cuCtxEnablePeerAccess", other, 0),
        "pool_set_access": lambda: raw.ask("cuMemPoolSetAccess", pool, [access], 1),
    }
    return _in_context(raw, calls)
