"""The methods about memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Mapping
from typing import Final

from ...errors import AiocudaError, DeviceOutOfMemory, InvalidArgumentError, StaleHandleError, UnsupportedError
from ..protocol import Advice, Allocation, ManagedAttributes
from . import _abi
from ._core import ANY_DEVICE, Core, OpenDevice, RelaxedCapture

__all__ = ["CudaMemory"]

_ADVICES: Final[Mapping[Advice, int]] = {
    "set_read_mostly": _abi.CU_MEM_ADVISE_SET_READ_MOSTLY,
    "unset_read_mostly": _abi.CU_MEM_ADVISE_UNSET_READ_MOSTLY,
    "set_preferred_location": _abi.CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    "unset_preferred_location": _abi.CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
    "set_accessed_by": _abi.CU_MEM_ADVISE_SET_ACCESSED_BY,
    "unset_accessed_by": _abi.CU_MEM_ADVISE_UNSET_ACCESSED_BY,
}

#: The smallest valid location: ``CU_DEVICE_CPU`` is -1. ``CU_DEVICE_INVALID``, -2, means none.
_HOST: Final = -1

#: The number of locations in one query: more than the devices of any machine, and the host.
_MOST_LOCATIONS: Final = 65

#: The attributes that `CudaMemory.locate` reads, in this order.
_ATTRIBUTES = (ctypes.c_int * 5)(
    _abi.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    _abi.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    _abi.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    _abi.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    _abi.CU_POINTER_ATTRIBUTE_IS_MANAGED,
)

#: ``madvise`` of the C library. Unlike that of Python's `mmap`, it does not hold the GIL.
_madvise: Final = getattr(ctypes.CDLL(None), "madvise", None) if os.name == "posix" else None

#: Advice of Linux 5.14. The second writes to no page, but needs pages that may be written.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23


class CudaMemory(Core):
    """`aiocuda.driver.protocol.Memory`."""

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        self._peer_lock = threading.Lock()
        self._peers: set[tuple[int, int]] = set()  # pairs of devices, in both orders, with peer access

    # Device memory

    def memory_info(self, device: int) -> tuple[int, int]:
        opened = self.opened(device)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with opened.current:
            code = self.release_gil.cuMemGetInfo(ctypes.byref(free), ctypes.byref(total))
            self.check_code("cuMemGetInfo", code, device)
        self.call_count += 1
        return free.value, total.value

    def locate(self, address: int) -> Allocation | None:
        values = (ctypes.c_uint64 * len(_ATTRIBUTES))()
        pointers = (ctypes.c_void_p * len(values))(
            *range(ctypes.addressof(values), ctypes.addressof(values) + ctypes.sizeof(values), 8)
        )
        # Not cuPointerGetAttribute, which fails for an unknown address. The plural form returns zeros.
        with self._any_opened().current:
            code = self.release_gil.cuPointerGetAttributes(len(values), _ATTRIBUTES, pointers, address)
            self.check_code("cuPointerGetAttributes", code)
        self.call_count += 1
        kind, ordinal, start, nbytes, managed = values
        if managed:
            return Allocation(-1, start, nbytes, True)
        return Allocation(ordinal, start, nbytes, False) if kind == _abi.CU_MEMORYTYPE_DEVICE else None

    def allocate(self, device: int, nbytes: int, stream: int) -> int:
        """Allocate device memory for work enqueued on ``stream`` from now on; return its address.

        Raises
        ------
        DeviceOutOfMemory
            With ``requested``, ``free`` (of the device), ``reserved`` (by the pool) and ``live`` (the used part of it).
        """
        opened = self.opened(device)
        info = self.stream_info(stream)
        out = ctypes.c_uint64()
        with RelaxedCapture(self, info.calls):
            code = info.calls.cuMemAllocFromPoolAsync(ctypes.byref(out), nbytes, opened.pool, info.handle)
        if code:
            error = self.error("cuMemAllocFromPoolAsync", code, device)
            if isinstance(error, DeviceOutOfMemory):
                # The pool has grown by all free memory of the device before it failed (measured with driver 580), and
                # keeps it. Then other libraries find none, and a kernel that migrates managed memory faults.
                self.pool_trim(device, 0)
                raise self._with_sizes(error, opened, nbytes)
            raise error
        self.call_count += 1
        return out.value

    def _with_sizes(self, error: DeviceOutOfMemory, opened: OpenDevice, nbytes: int) -> DeviceOutOfMemory:
        free, total = self.memory_info(opened.index)
        reserved = self._pool_attribute(opened, _abi.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
        live = self._pool_attribute(opened, _abi.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
        facts = {**error.__dict__, "requested": nbytes, "free": free, "reserved": reserved, "live": live}
        return DeviceOutOfMemory(
            f"device {opened.index} has no room for {nbytes:,} bytes: {free:,} of {total:,} are free, and {live:,} of "
            f"the {reserved:,} that the pool holds are in use; {error}",
            **facts,
        )

    def deallocate(self, address: int, stream: int) -> None:
        if self.has_faulted:
            return
        info = self.stream_info(stream)
        with RelaxedCapture(self, info.calls):
            code = info.calls.cuMemFreeAsync(address, info.handle)
        self._check_release("cuMemFreeAsync", code, address, info.device)

    def pool_reserved(self, device: int) -> int:
        return self._pool_attribute(self.opened(device), _abi.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    def _pool_attribute(self, opened: OpenDevice, which: int) -> int:
        out = ctypes.c_uint64()
        with RelaxedCapture(self, self.fast):
            code = self.fast.cuMemPoolGetAttribute(opened.pool, which, ctypes.byref(out))
        self.check_code("cuMemPoolGetAttribute", code, opened.index)
        self.call_count += 1
        return out.value

    def pool_trim(self, device: int, keep: int) -> None:
        opened = self.opened(device)
        with RelaxedCapture(self):
            code = self.release_gil.cuMemPoolTrimTo(opened.pool, keep)
        self.check_code("cuMemPoolTrimTo", code, device)
        self.call_count += 1

    # Host and managed memory

    def _any_opened(self) -> OpenDevice:
        """Return any open device. Portable host memory can be allocated in the context of any device."""
        self.check()
        for opened in list(self.open_devices.values()):
            return opened
        raise InvalidArgumentError("no CUDA device is open: open one first")

    def pinned_allocate(self, nbytes: int) -> int:
        opened = self._any_opened()
        out = ctypes.c_uint64()
        with opened.current, RelaxedCapture(self):
            code = self.release_gil.cuMemHostAlloc(ctypes.byref(out), nbytes, _abi.CU_MEMHOSTALLOC_PORTABLE)
            if code:
                raise self._no_host_memory(self.error("cuMemHostAlloc", code), nbytes)
        self.call_count += 1
        return out.value

    def pinned_deallocate(self, address: int) -> None:
        if self.has_faulted:
            return
        with self._any_opened().current, RelaxedCapture(self):
            self._check_release("cuMemFreeHost", self.release_gil.cuMemFreeHost(address), address)

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock existing host memory.

        ``cuMemHostRegister`` holds the launches of all other threads: for 0.32 ms per MB if no page is in memory, for
        0.035 if all are. So the system first puts them there, which holds no launch.
        """
        _populate(address, nbytes)
        with self._any_opened().current, RelaxedCapture(self):
            code = self.release_gil.cuMemHostRegister(address, nbytes, _abi.CU_MEMHOSTREGISTER_PORTABLE)
            if code:
                raise self._no_host_memory(self.error("cuMemHostRegister", code), nbytes)
        self.call_count += 1

    def unpin(self, address: int) -> None:
        if self.has_faulted:
            return
        with self._any_opened().current, RelaxedCapture(self):
            self._check_release("cuMemHostUnregister", self.release_gil.cuMemHostUnregister(address), address)

    def managed_allocate(self, device: int, nbytes: int) -> int:
        opened = self.opened(device)
        if not opened.properties.managed_memory:
            raise UnsupportedError(f"device {device} ({opened.properties.name}) has no managed memory")
        out = ctypes.c_uint64()
        with opened.current, RelaxedCapture(self):
            code = self.release_gil.cuMemAllocManaged(ctypes.byref(out), nbytes, _abi.CU_MEM_ATTACH_GLOBAL)
            if code:
                error = self.error("cuMemAllocManaged", code, device)
                raise self._with_sizes(error, opened, nbytes) if isinstance(error, DeviceOutOfMemory) else error
        self.call_count += 1
        return out.value

    def managed_deallocate(self, address: int) -> None:
        if self.has_faulted:
            return
        with self._any_opened().current, RelaxedCapture(self):
            self._check_release("cuMemFree", self.release_gil.cuMemFree(address), address)

    @staticmethod
    def _no_host_memory(error: AiocudaError, nbytes: int) -> AiocudaError:
        if not isinstance(error, DeviceOutOfMemory):
            return error
        return DeviceOutOfMemory(
            f"the host has no room for {nbytes:,} page-locked bytes; {error}", **{**error.__dict__, "requested": nbytes}
        )

    def _check_release(self, call: str, code: int, address: int, device: int = ANY_DEVICE) -> None:
        if code == _abi.CUDA_ERROR_INVALID_VALUE:
            self.call_count += 1
            raise StaleHandleError(
                f"{call}: no allocation begins at 0x{address:x}: it was freed before, or is not ours",
                code=code,
                call=call,
            )
        if code:
            self.fail_release(call, code, device)
        else:
            self.call_count += 1

    # Copies, fills and prefetches

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        info = self.stream_info(stream)
        code = info.calls.cuMemcpyHtoDAsync(target, source, nbytes, info.handle)
        if code:
            self.copy_again("cuMemcpyHtoDAsync", code, info, target, source, nbytes, info.handle)
        self.call_count += 1

    def download(self, stream: int, target: int, source: int, nbytes: int) -> None:
        info = self.stream_info(stream)
        code = info.calls.cuMemcpyDtoHAsync(target, source, nbytes, info.handle)
        if code:
            self.copy_again("cuMemcpyDtoHAsync", code, info, target, source, nbytes, info.handle)
        self.call_count += 1

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        info = self.stream_info(stream)
        code = info.calls.cuMemcpyDtoDAsync(target, source, nbytes, info.handle)
        if code:
            self.copy_again("cuMemcpyDtoDAsync", code, info, target, source, nbytes, info.handle)
        self.call_count += 1

    def copy_peer(
        self, stream: int, target: int, target_device: int, source: int, source_device: int, nbytes: int
    ) -> None:
        """Copy from one device to another. The first copy between two devices enables peer access, and takes longer.

        Without peer access, `UnsupportedError`: CUDA would stage the copy through the host, and block the caller (0.76
        ms for 256 MB).
        """
        info = self.stream_info(stream)
        to, origin = self.opened(target_device), self.opened(source_device)
        if (target_device, source_device) not in self._peers:
            self._enable_peers(to, origin)
        code = info.calls.cuMemcpyPeerAsync(target, to.primary, source, origin.primary, nbytes, info.handle)
        if code:
            self.fail("cuMemcpyPeerAsync", code, info.device)
        self.call_count += 1

    def _enable_peers(self, one: OpenDevice, other: OpenDevice) -> None:
        with self._peer_lock:
            if one.index != other.index:
                self._enable_peer(one, other)
                self._enable_peer(other, one)
            self._peers |= {(one.index, other.index), (other.index, one.index)}

    def _enable_peer(self, here: OpenDevice, there: OpenDevice) -> None:
        """Let one device access another's memory: that of its context, and that of its pool, which has own rights."""
        can = ctypes.c_int()
        code = self.release_gil.cuDeviceCanAccessPeer(ctypes.byref(can), here.handle, there.handle)
        self.check_code("cuDeviceCanAccessPeer", code, here.index)
        if not can.value:
            raise UnsupportedError(
                f"device {here.index} cannot reach the memory of device {there.index}: copy through the host"
            )
        with here.current, RelaxedCapture(self):
            code = self.release_gil.cuCtxEnablePeerAccess(there.primary, 0)
            if code and code != _abi.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
                self.fail("cuCtxEnablePeerAccess", code, here.index)
        access = _abi.CUmemAccessDesc(
            location=_abi.CUmemLocation(_abi.CU_MEM_LOCATION_TYPE_DEVICE, here.index),
            flags=_abi.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        )
        code = self.release_gil.cuMemPoolSetAccess(there.pool, ctypes.byref(access), 1)
        self.check_code("cuMemPoolSetAccess", code, there.index)

    def fill(self, stream: int, target: int, pattern: bytes, count: int) -> None:
        info = self.stream_info(stream)
        size = len(pattern)
        if size not in (1, 2, 4, 8, 16):
            raise InvalidArgumentError(f"a fill pattern has 1, 2, 4, 8 or 16 bytes, not {size}", size=size)
        # Devices are little-endian. If a pattern's words differ, each word is a column of a two-dimensional fill.
        words = [int.from_bytes(pattern[at : at + 4], "little") for at in range(0, size, 4)]
        calls = info.calls
        if size == 1:
            call, code = "cuMemsetD8Async", calls.cuMemsetD8Async(target, words[0], count, info.handle)
        elif size == 2:
            call, code = "cuMemsetD16Async", calls.cuMemsetD16Async(target, words[0], count, info.handle)
        elif len(set(words)) == 1:
            call, code = "cuMemsetD32Async", calls.cuMemsetD32Async(target, words[0], count * len(words), info.handle)
        else:
            call, code = "cuMemsetD2D32Async", 0
            for at, word in enumerate(words):
                code = code or calls.cuMemsetD2D32Async(target + 4 * at, size, word, 1, count, info.handle)
        if code:
            self.fail(call, code, info.device)
        self.call_count += 1

    def prefetch(self, stream: int, address: int, nbytes: int, device: int) -> None:
        info = self.stream_info(stream)
        code = info.calls.cuMemPrefetchAsync(address, nbytes, self._location(device), 0, info.handle)
        if code:
            self.fail("cuMemPrefetchAsync", code, info.device)
        self.call_count += 1

    def advise(self, address: int, nbytes: int, advice: Advice, device: int) -> None:
        where = self._location(device)
        with self._any_opened().current, RelaxedCapture(self):
            code = self.release_gil.cuMemAdvise(address, nbytes, _ADVICES[advice], where)
            self.check_code("cuMemAdvise", code, device)
        self.call_count += 1

    def managed_attributes(self, address: int, nbytes: int) -> ManagedAttributes:
        with self._any_opened().current, RelaxedCapture(self):
            read_mostly, preferred, prefetched = (
                self._range_attribute(which, address, nbytes)[0]
                for which in (
                    _abi.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
                    _abi.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
                    _abi.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
                )
            )
            accessed = self._range_attribute(_abi.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, address, nbytes, _MOST_LOCATIONS)
        self.call_count += 1
        return ManagedAttributes(
            read_mostly=read_mostly == 1,
            preferred_location=preferred if preferred >= _HOST else None,
            accessed_by=frozenset(location for location in accessed if location >= _HOST),
            last_prefetch=prefetched if prefetched >= _HOST else None,
        )

    def _range_attribute(self, which: int, address: int, nbytes: int, count: int = 1) -> list[int]:
        out = (ctypes.c_int * count)()
        code = self.release_gil.cuMemRangeGetAttribute(ctypes.byref(out), ctypes.sizeof(out), which, address, nbytes)
        self.check_code("cuMemRangeGetAttribute", code)
        return list(out)

    def _location(self, device: int) -> _abi.CUmemLocation:
        """Return the location of an open device, or of the host (-1)."""
        if device < 0:
            return _abi.CUmemLocation(_abi.CU_MEM_LOCATION_TYPE_HOST, 0)
        return _abi.CUmemLocation(_abi.CU_MEM_LOCATION_TYPE_DEVICE, self.opened(device).index)


def _populate(address: int, nbytes: int) -> None:
    """Put the pages of host memory into memory. Does nothing where the system cannot: then the registration does it."""
    if _madvise is None:
        return
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE - begin
    for advice in (_MADV_POPULATE_WRITE, _MADV_POPULATE_READ):  # the second for a file that is mapped to be read
        if _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice) == 0:
            return
