"""The methods about memory, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ...errors import InvalidArgumentError, WrongDeviceError
from ..protocol import Advice, Allocation, ManagedAttributes
from ._core import Core
from ._work import Bytes, DeviceCopy, Fill, PeerCopy, Prefetch, Transfer
from .rules import PageKind, Stream

__all__ = ["Memory"]

_PATTERNS = (1, 2, 4, 8, 16)


class Memory(Core):
    """`aiocuda.driver.protocol.Memory` without a GPU.

    The host memory of a copy is looked up when the copy is enqueued, the device memory when it runs. A range that is
    not completely allocated then is an illegal address, and latches a fault.
    """

    def memory_info(self, device: int) -> tuple[int, int]:
        self._enter_device(device)
        with self._lock:
            return self._memory.info(device)

    def locate(self, address: int) -> Allocation | None:
        self._enter()
        with self._lock:
            block = self._memory.locate(address)
            if block is not None:
                return Allocation(block.device, block.address, block.nbytes, False)
            found = self._pages.locate(address)
        if found is None or found[0] != "managed":
            return None
        return Allocation(-1, *found[1:], True)

    def peek(self, device: int, address: int, nbytes: int) -> Bytes:
        """Return device memory as an array over it. The caller ensures that no command uses the memory.

        `Driver` has no such method: CUDA has none.
        """
        self._enter_device(device)
        return self._bytes_at(device, address, nbytes)

    def allocate(self, device: int, nbytes: int, stream: int) -> int:
        self._enter()
        self._check_device(device)
        with self._lock:
            owner = self._machine.stream(stream)
            self._check_same_device(owner, device)
            block = self._memory.allocate(device, nbytes, stream)
            self._submit(owner, "allocate", block)
            return block.address

    def deallocate(self, address: int, stream: int) -> None:
        """Free device memory once the work already enqueued on ``stream`` is done. After a fault, do nothing."""
        self._enter_release()
        if self._call_error is not None:
            return
        with self._lock:
            last = self._machine.stream(stream)
            self._check_stream_owner(last, address)
            block = self._memory.deallocate(address, stream)
            self._submit(last, "free", (block, stream))

    def pool_reserved(self, device: int) -> int:
        self._enter_device(device)
        with self._lock:
            return self._memory.reserved(device)

    def pool_trim(self, device: int, keep: int) -> None:
        self._enter_device(device)
        with self._lock:
            self._memory.trim(device, keep)

    def pinned_allocate(self, nbytes: int) -> int:
        """Allocate host memory that every device can access, aligned to 64 bytes."""
        self._enter()
        with self._lock:
            return self._pages.allocate("pinned", nbytes)

    def pinned_deallocate(self, address: int) -> None:
        """Free pinned memory. **May block**: waits for all work that the devices have accepted, as CUDA does."""
        self._release("pinned", address)

    def pin(self, address: int, nbytes: int) -> None:
        """Let devices access existing host memory. The caller keeps it alive until `unpin`."""
        self._enter()
        with self._lock:
            self._pages.register(address, nbytes)

    def unpin(self, address: int) -> None:
        """End the effect of `pin`. **May block**: waits for all work that the devices have accepted."""
        self._release("registered", address)

    def managed_allocate(self, device: int, nbytes: int) -> int:
        self._enter_device(device)
        with self._lock:
            return self._pages.allocate("managed", nbytes)

    def managed_deallocate(self, address: int) -> None:
        """Free managed memory. **May block**: waits for all work that the devices have accepted, as CUDA does."""
        self._release("managed", address)

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy from the host to the device, on its upload engine. The source is read when the transfer ends."""
        self._transfer(stream, "upload", target, source, nbytes)

    def download(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy from the device to the host, on its download engine."""
        self._transfer(stream, "download", source, target, nbytes)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Copy within one device, on its compute engine."""
        self._enter()
        with self._lock:
            on = self._machine.stream(stream)
            self._check_stream_owner(on, target)
            self._check_stream_owner(on, source)
            if _is_positive(nbytes):
                work = DeviceCopy(target, source, nbytes)
                self._submit_work(on, "copy", work, self._machine.engine(on.device, "compute"))

    def copy_peer(
        self, stream: int, target: int, target_device: int, source: int, source_device: int, nbytes: int
    ) -> None:
        """Copy from one device to another, on the source's download engine, with the bandwidth of a transfer."""
        self._enter_device(target_device)
        self._check_device(source_device)
        with self._lock:
            on = self._machine.stream(stream)
            self._check_owner(target, target_device)
            self._check_owner(source, source_device)
            if _is_positive(nbytes):
                seconds = self.model.transfer_seconds(nbytes)
                work = PeerCopy(seconds, target, target_device, source, nbytes)
                self._submit_work(on, "peer", work, self._machine.engine(source_device, "download"))

    def fill(self, stream: int, target: int, pattern: bytes, count: int) -> None:
        """Write a pattern repeatedly, on the device's compute engine."""
        self._enter()
        self._check_pattern(pattern)
        with self._lock:
            on = self._machine.stream(stream)
            self._check_stream_owner(on, target)
            if _is_positive(count):
                work = Fill(target, bytes(pattern), count)
                self._submit_work(on, "fill", work, self._machine.engine(on.device, "compute"))

    def prefetch(self, stream: int, address: int, nbytes: int, device: int) -> None:
        """Use the copy engine for the time of a transfer. Managed memory is host memory, so nothing is moved."""
        self._enter()
        self._check_location(device)
        with self._lock:
            on = self._machine.stream(stream)
            if _is_positive(nbytes):
                self._pages.change(address, nbytes, lambda was: dataclasses.replace(was, last_prefetch=device))
                engine = self._machine.engine(on.device, "download" if device == -1 else "upload")
                self._submit_work(on, "prefetch", Prefetch(self.model.transfer_seconds(nbytes)), engine)

    def advise(self, address: int, nbytes: int, advice: Advice, device: int) -> None:
        """Store the advice for `managed_attributes`. It has no effect on speed: managed memory is host memory."""
        self._enter()
        if advice.endswith(("location", "accessed_by")):
            self._check_location(device)
        setting = advice.startswith("set_")

        def advised(was: ManagedAttributes) -> ManagedAttributes:
            if advice.endswith("read_mostly"):
                return dataclasses.replace(was, read_mostly=setting)
            if advice.endswith("preferred_location"):
                return dataclasses.replace(was, preferred_location=device if setting else None)
            others = was.accessed_by - {device}
            return dataclasses.replace(was, accessed_by=others | {device} if setting else others)

        with self._lock:
            self._pages.change(address, nbytes, advised)

    def managed_attributes(self, address: int, nbytes: int) -> ManagedAttributes:
        self._enter()
        with self._lock:
            return self._pages.attributes(address, nbytes)

    def _check_location(self, device: int) -> None:
        if device != -1:
            self._check_device(device)

    def _transfer(
        self, stream: int, kind: Literal["upload", "download"], address: int, host_address: int, nbytes: int
    ) -> None:
        self._enter()
        with self._lock:
            on = self._machine.stream(stream)
            self._check_stream_owner(on, address)
            if _is_positive(nbytes):
                host = self._host_bytes(host_address, nbytes)
                work = Transfer(self.model.transfer_seconds(nbytes), address, host, kind == "upload")
                self._submit_work(on, kind, work, self._machine.engine(on.device, kind))

    def _host_bytes(self, address: int, nbytes: int) -> Bytes:
        found = self._pages.find(address, nbytes)
        if found is None:
            raise InvalidArgumentError(
                f"{nbytes} bytes at {address:#x} are not pinned or managed host memory; copies take nothing else",
                address=address,
            )
        return found[1]

    def _check_stream_owner(self, stream: Stream, address: int) -> None:
        """Raise if the address is memory of another device than the stream's. Other addresses are checked later."""
        owner = self._memory.device_of(address)
        if owner is not None and owner != stream.device:
            raise WrongDeviceError(
                f"{address:#x} is memory of device {owner}, and stream {stream.handle} belongs to device "
                f"{stream.device}; copy it with copy_peer",
                device=owner,
                expected=stream.device,
            )

    @staticmethod
    def _check_pattern(pattern: bytes) -> None:
        if len(pattern) not in _PATTERNS:
            raise InvalidArgumentError(
                f"a pattern has 1, 2, 4, 8 or 16 bytes; {pattern!r} has {len(pattern)}", pattern=pattern
            )

    def _check_owner(self, address: int, device: int) -> None:
        owner = self._memory.device_of(address)
        if owner is not None and owner != device:
            raise WrongDeviceError(
                f"{address:#x} is memory of device {owner}, not of device {device}", device=owner, expected=device
            )

    def _release(self, kind: PageKind, address: int) -> None:
        """Release host memory after all work that the devices have accepted."""
        self._enter_release()
        with self._lock:
            self._pages.check(kind, address)
            streams = self._machine.busy_streams()

        def release() -> None:
            with self._lock:
                self._pages.release(kind, address)

        self._synchronize(streams, release)


def _is_positive(count: int) -> bool:
    """True for a positive count, False for 0, which needs no command. Raise for a negative count."""
    if count < 0:
        raise InvalidArgumentError(f"cannot copy or fill {count} items", count=count)
    return count > 0
