"""Verbs about bytes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ...errors import InvalidArgumentError, WrongDeviceError
from ..protocol import Allocation
from ..protocol._memory import Advice, ManagedAttributes
from ._core import Core
from ._work import Bytes, DeviceCopy, Fill, PeerCopy, Prefetch, Transfer
from .rules import PageKind, Stream

__all__ = ["Memory"]

_PATTERNS = (1, 2, 4, 8, 16)


class Memory(Core):
    """`aiocuda.driver.protocol._memory.Memory` without a GPU.

    The host's side of a copy is looked up when the copy is enqueued, the device's when it runs. A range that is not
    all there then is an illegal address, and latches a fault.
    """

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes."""
        self._enter()
        self._device(device)
        with self._lock:
            return self._memory.info(device)

    def locate(self, address: int) -> Allocation | None:
        """The device or managed memory that an address lies in."""
        self._enter()
        with self._lock:
            block = self._memory.locate(address)
            if block is not None:
                return Allocation(block.device, block.address, block.nbytes, False)
            found = self._pages.locate(address)
        if found is None or found[0] != "managed":
            return None
        return Allocation(-1, *found[1:], True)

    def allocate(self, device: int, nbytes: int, stream: int) -> int:
        """Device memory, from ``stream``'s present end on."""
        self._enter()
        self._device(device)
        with self._lock:
            owner = self._machine.stream(stream)
            self._same_device(owner, device)
            block = self._memory.allocate(device, nbytes, stream)
            self._submit(owner, "allocate", block)
            return block.address

    def deallocate(self, address: int, stream: int) -> None:
        """Give it back at ``stream``'s present end. After a fault nothing is left to do."""
        self._enter_release()
        if self._refusal is not None:
            return
        with self._lock:
            last = self._machine.stream(stream)
            self._own(last, address)
            block = self._memory.deallocate(address, stream)
            self._submit(last, "free", (block, stream))

    def pool_reserved(self, device: int) -> int:
        """Bytes that the pool holds, in use or not."""
        self._enter()
        self._device(device)
        with self._lock:
            return self._memory.reserved(device)

    def pool_trim(self, device: int, keep: int) -> None:
        """Give unused bytes beyond ``keep`` back."""
        self._enter()
        self._device(device)
        with self._lock:
            self._memory.trim(device, keep)

    def pinned_allocate(self, nbytes: int) -> int:
        """Host memory that every device can reach, aligned to 64 bytes."""
        self._enter()
        with self._lock:
            return self._pages.allocate("pinned", nbytes)

    def pinned_deallocate(self, address: int) -> None:
        """**May block**: waits for all that the devices have accepted so far, as CUDA does."""
        self._release("pinned", address)

    def pin(self, address: int, nbytes: int) -> None:
        """Let devices reach somebody's own memory, which stays alive until `unpin`."""
        self._enter()
        with self._lock:
            self._pages.register(address, nbytes)

    def unpin(self, address: int) -> None:
        """**May block**: waits for all that the devices have accepted so far."""
        self._release("registered", address)

    def managed_allocate(self, device: int, nbytes: int) -> int:
        """Memory with one address for the host and every device."""
        self._enter()
        self._device(device)
        with self._lock:
            return self._pages.allocate("managed", nbytes)

    def managed_deallocate(self, address: int) -> None:
        """**May block**: waits for all that the devices have accepted so far, as CUDA does."""
        self._release("managed", address)

    def upload(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Host to device, on the device's upload engine. The source is read when the transfer ends."""
        self._transfer(stream, "upload", target, source, nbytes)

    def download(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Device to host, on the device's download engine."""
        self._transfer(stream, "download", source, target, nbytes)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Within one device, on its compute engine."""
        self._enter()
        with self._lock:
            on = self._machine.stream(stream)
            self._own(on, target)
            self._own(on, source)
            if _is_some(nbytes):
                work = DeviceCopy(target, source, nbytes)
                self._submit_work(on, "copy", work, self._machine.engine(on.device, "compute"))

    def copy_peer(
        self, stream: int, target: int, target_device: int, source: int, source_device: int, nbytes: int
    ) -> None:
        """From one device to another, pushed by the source's download engine at the bandwidth of a transfer."""
        self._enter()
        self._device(target_device)
        self._device(source_device)
        with self._lock:
            on = self._machine.stream(stream)
            self._belongs(target, target_device)
            self._belongs(source, source_device)
            if _is_some(nbytes):
                seconds = self.model.transfer_seconds(nbytes)
                work = PeerCopy(seconds, target, target_device, source, nbytes)
                self._submit_work(on, "peer", work, self._machine.engine(source_device, "download"))

    def fill(self, stream: int, target: int, pattern: bytes, count: int) -> None:
        """Repeat a pattern, on the device's compute engine."""
        self._enter()
        self._check_pattern(pattern)
        with self._lock:
            on = self._machine.stream(stream)
            self._own(on, target)
            if _is_some(count):
                work = Fill(target, bytes(pattern), count)
                self._submit_work(on, "fill", work, self._machine.engine(on.device, "compute"))

    def prefetch(self, stream: int, address: int, nbytes: int, device: int) -> None:
        """Takes the time of a transfer. Moves nothing: managed memory is the host's own."""
        self._enter()
        self._place(device)
        with self._lock:
            on = self._machine.stream(stream)
            if _is_some(nbytes):
                self._pages.change(address, nbytes, lambda was: dataclasses.replace(was, last_prefetch=device))
                engine = self._machine.engine(on.device, "download" if device == -1 else "upload")
                self._submit_work(on, "prefetch", Prefetch(self.model.transfer_seconds(nbytes)), engine)

    def advise(self, address: int, nbytes: int, advice: Advice, device: int) -> None:
        """Keep it, for `managed_attributes`. It makes nothing quicker: managed memory is the host's own."""
        self._enter()
        if advice.endswith(("location", "accessed_by")):
            self._place(device)
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
        """What has been advised, and where it was last prefetched to."""
        self._enter()
        with self._lock:
            return self._pages.attributes(address, nbytes)

    def _place(self, device: int) -> None:
        if device != -1:
            self._device(device)

    def _transfer(self, stream: int, kind: Literal["upload", "download"], there: int, here: int, nbytes: int) -> None:
        self._enter()
        with self._lock:
            on = self._machine.stream(stream)
            self._own(on, there)
            if _is_some(nbytes):
                host = self._host_side(here, nbytes)
                work = Transfer(self.model.transfer_seconds(nbytes), there, host, kind == "upload")
                self._submit_work(on, kind, work, self._machine.engine(on.device, kind))

    def _host_side(self, address: int, nbytes: int) -> Bytes:
        found = self._pages.find(address, nbytes)
        if found is None:
            raise InvalidArgumentError(
                f"{nbytes} bytes at {address:#x} are not pinned or managed host memory; copies take nothing else",
                address=address,
            )
        return found[1]

    def _own(self, stream: Stream, address: int) -> None:
        """Device memory must be of the stream's device. What is no device memory is looked up when the command runs."""
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

    def _belongs(self, address: int, device: int) -> None:
        owner = self._memory.device_of(address)
        if owner is not None and owner != device:
            raise WrongDeviceError(
                f"{address:#x} is memory of device {owner}, not of device {device}", device=owner, expected=device
            )

    def _release(self, kind: PageKind, address: int) -> None:
        """Give host memory back behind all that the devices have accepted so far."""
        self._enter_release()
        with self._lock:
            self._pages.check(kind, address)
            streams = self._machine.busy_streams()

        def release() -> None:
            with self._lock:
                self._pages.release(kind, address)

        self._synchronize(streams, release)


def _is_some(count: int) -> bool:
    """False for nothing at all, which is done when it is enqueued: it has no place in the order."""
    if count < 0:
        raise InvalidArgumentError(f"cannot copy or fill {count} items", count=count)
    return count > 0
