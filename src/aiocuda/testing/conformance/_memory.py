"""Memory: copies, fills, allocations, page-locked and managed memory."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from ...driver.protocol import Advice, ManagedAttributes
from ...errors import AiocudaError, DeviceOutOfMemory, UnsupportedError
from ._base import Conformance
from ._rig import Array, Rig, address_of

__all__ = ["MemoryConformance"]

_SIZES = [1, 3, 255, 4097, (1 << 20) + 13]


def _noise(nbytes: int) -> Array:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype="u1")


class MemoryConformance(Conformance):
    """Rules for copies, fills, allocations, page-locked and managed memory."""

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_copies_carry_every_byte(self, rig: Rig, nbytes: int) -> None:
        """Upload, copy and download transfer any number of bytes unchanged."""
        source, target = rig.pinned(nbytes), rig.pinned(nbytes)
        first, second = rig.memory(nbytes), rig.memory(nbytes)
        source[:], target[:] = _noise(nbytes), 0
        stream = rig.stream()
        rig.driver.upload(stream, first, address_of(source), nbytes)
        rig.driver.copy(stream, second, first, nbytes)
        rig.driver.download(stream, address_of(target), second, nbytes)
        rig.finish(stream)
        assert (target == source).all()

    @pytest.mark.parametrize("verb", ["upload", "copy", "download"])
    def test_copies_write_nothing_else(self, rig: Rig, verb: str) -> None:
        """A copy between odd addresses writes only its own bytes."""
        # 1 001 bytes to the odd offset 513 of 4 096, from the odd offset 77.
        ones = np.full(4096, 0xFF, "u1")
        host, device = rig.small(4096), rig.memory(4096)
        source_host, source_device = rig.small(4096, value=0xFF), rig.uploaded(ones)
        stream = rig.stream()
        if verb == "upload":
            rig.driver.upload(stream, device + 513, address_of(source_host) + 77, 1001)
        elif verb == "copy":
            rig.driver.copy(stream, device + 513, source_device + 77, 1001)
        else:
            rig.driver.download(stream, address_of(host) + 513, source_device + 77, 1001)
        rig.finish(stream)
        expected = np.zeros(4096, "u1")
        expected[513 : 513 + 1001] = 0xFF
        assert ((host if verb == "download" else rig.look(device, 4096)) == expected).all()

    @pytest.mark.parametrize("count", [1, 5, 1023])
    @pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
    def test_fill_writes_the_pattern_and_nothing_else(self, rig: Rig, width: int, count: int) -> None:
        """A fill repeats patterns of 1, 2, 4, 8 and 16 bytes."""
        pattern = bytes(range(1, width + 1))
        memory = rig.memory((count + 2) * width)
        stream = rig.stream()
        rig.driver.fill(stream, memory + width, pattern, count)
        rig.finish(stream)
        expected = np.frombuffer(bytes(width) + pattern * count + bytes(width), "u1")
        assert (rig.look(memory, (count + 2) * width) == expected).all()

    def test_fill_of_equal_halves(self, rig: Rig) -> None:
        """A pattern with equal halves is filled correctly."""
        # A driver may write these patterns by a narrower fill.
        stream, memory = rig.stream(), rig.memory(64)
        patterns = [b"\xab" * 16, b"\x01\x02" * 4, bytes(8), b"\x01\x02\x03\x04" * 4]
        for index, pattern in enumerate(patterns):
            rig.driver.fill(stream, memory + 16 * index, pattern, 16 // len(pattern))
        rig.finish(stream)
        assert rig.look(memory, 64).tobytes() == b"".join(each * (16 // len(each)) for each in patterns)

    def test_allocations_do_not_overlap(self, rig: Rig) -> None:
        """Allocations have no byte in common, and begin at multiples of 256."""
        sizes = [1, 255, 256, 257, 4096, 100_000, 1]
        blocks = sorted((rig.memory(size), size) for size in sizes)
        for (address, size), (following, _) in itertools.pairwise(blocks):
            assert address + size <= following
        assert all(address % 256 == 0 for address, _ in blocks)  # as cuMemAlloc guarantees, and vector loads require

    def test_memory_is_reused_in_stream_order(self, rig: Rig) -> None:
        """Memory that is freed and allocated again in one stream keeps its content until its last use."""
        driver, stream = rig.driver, rig.stream()
        target = rig.small(4096)
        hold = rig.hold(stream)
        with rig.unblocked("allocating and freeing in stream order"):
            first = driver.allocate(rig.device, 4096, stream)
            driver.fill(stream, first, b"\x11", 4096)
            driver.download(stream, address_of(target), first, 4096)
            driver.deallocate(first, stream)
            second = driver.allocate(rig.device, 4096, stream)
            driver.fill(stream, second, b"\x22", 4096)
        hold.release()
        rig.finish(stream)
        assert (target == 0x11).all()
        assert (rig.look(second, 4096) == 0x22).all()
        rig.free(second, stream)

    def test_pending_free_keeps_the_memory_and_delays_no_other_stream(self, rig: Rig) -> None:
        """A free in a held stream does not block, and other streams get other memory."""
        driver, held, free = rig.driver, rig.stream(), rig.stream()
        target = rig.small(4096)
        memory = driver.allocate(rig.device, 4096, held)
        driver.fill(held, memory, b"\x11", 4096)
        hold = rig.hold(held)
        driver.download(held, address_of(target), memory, 4096)
        driver.deallocate(memory, held)
        others = []
        with rig.unblocked("allocating while a free is pending"):
            for _ in range(8):
                others.append(driver.allocate(rig.device, 4096, free))
                driver.fill(free, others[-1], b"\x22", 4096)
        rig.finish(free)
        assert hold.running
        hold.release()
        rig.finish(held)
        assert (target == 0x11).all()
        for other in others:
            driver.deallocate(other, free)

    def test_memory_freed_in_another_stream_is_kept_for_its_last_use(self, rig: Rig) -> None:
        """A free that waits for another stream keeps the memory until that stream has used it."""
        driver, user, owner = rig.driver, rig.stream(), rig.stream()
        target = rig.small(4096)
        memory = driver.allocate(rig.device, 4096, owner)
        driver.fill(owner, memory, b"\x11", 4096)
        driver.stream_wait(user, rig.record(owner))
        hold = rig.hold(user)
        driver.download(user, address_of(target), memory, 4096)
        driver.stream_wait(owner, rig.record(user))
        with rig.unblocked("freeing behind a wait"):
            driver.deallocate(memory, owner)
            second = driver.allocate(rig.device, 4096, owner)
            driver.fill(owner, second, b"\x22", 4096)
        rig.witness()
        hold.release()
        rig.finish(user, owner)
        assert (target == 0x11).all()
        driver.deallocate(second, owner)

    def test_address_is_found_in_its_allocation(self, rig: Rig) -> None:
        """`locate` finds the allocation of a device address, and none for a host address."""
        driver, stream = rig.driver, rig.stream()
        memory = driver.allocate(rig.device, 3000, stream)
        found = driver.locate(memory + 2999)
        assert found is not None
        assert (found.device, found.managed) == (rig.device, False)
        assert found.address <= memory < memory + 3000 <= found.address + found.nbytes
        assert driver.locate(address_of(rig.pinned(64))) is None
        assert driver.locate(address_of(np.zeros(64))) is None
        driver.deallocate(memory, stream)

    def test_out_of_memory_reports_sizes_and_is_not_permanent(self, rig: Rig) -> None:
        """A too large allocation raises `DeviceOutOfMemory` with the sizes and takes no memory; later ones succeed."""
        stream = rig.stream()
        free, total = rig.driver.memory_info(rig.device)
        assert 0 < free <= total
        with pytest.raises(DeviceOutOfMemory) as caught:
            rig.driver.allocate(rig.device, 2 * total, stream)
        assert caught.value.requested == 2 * total
        assert 0 <= caught.value.free <= total
        assert rig.driver.memory_info(rig.device)[0] >= free  # the pool has not kept what it tried
        memory = rig.driver.allocate(rig.device, 1000, stream)
        rig.driver.fill(stream, memory, b"\x01", 1000)
        rig.finish(stream)
        assert (rig.look(memory, 1000) == 1).all()
        rig.free(memory, stream)

    def test_pool_keeps_what_is_freed_until_it_is_trimmed(self, rig: Rig) -> None:
        """The pool keeps freed memory until `pool_trim`."""
        driver, stream, nbytes = rig.driver, rig.stream(), 64 << 20  # more than one step by which a pool grows
        memory = driver.allocate(rig.device, nbytes, stream)
        rig.finish(stream)
        held = driver.pool_reserved(rig.device)
        assert held >= nbytes
        driver.deallocate(memory, stream)
        rig.offload(lambda: driver.stream_synchronize(stream))
        rig.offload(lambda: driver.pool_trim(rig.device, 2 * held))
        assert driver.pool_reserved(rig.device) >= nbytes
        rig.offload(lambda: driver.pool_trim(rig.device, 0))
        assert driver.pool_reserved(rig.device) < nbytes

    def test_pinned_memory_is_host_memory(self, rig: Rig) -> None:
        """Page-locked memory can be read and written by the host, and is aligned to 64 bytes."""
        blocks = [rig.pinned(size) for size in (1, 4096, 1 << 20)]
        for value, block in enumerate(blocks, 1):
            block[:] = value
        for value, block in enumerate(blocks, 1):
            assert (block == value).all()
            assert address_of(block) % 64 == 0

    def test_memory_of_the_caller_can_be_pinned(self, rig: Rig) -> None:
        """`pin` locks an array of the caller; the device copies into it."""
        own = np.zeros(3 * 4096 + 5, "u1")
        device = rig.uploaded(_noise(own.nbytes))
        stream = rig.stream()
        rig.offload(lambda: rig.driver.pin(address_of(own), own.nbytes))
        try:
            rig.driver.download(stream, address_of(own), device, own.nbytes)
            rig.finish(stream)
        finally:
            rig.offload(lambda: rig.driver.unpin(address_of(own)))
        assert (own == _noise(own.nbytes)).all()

    def test_managed_memory_is_shared_by_host_and_device(self, rig: Rig) -> None:
        """Host and device read and write the same managed memory."""
        driver = rig.driver
        if not rig.properties.managed_memory:
            with pytest.raises(UnsupportedError):
                rig.managed(64, "u4")
            return
        words, stream = rig.managed(1024, "u4"), rig.stream()
        words[:] = np.arange(1024)
        with rig.unblocked("a prefetch"):
            driver.prefetch(stream, address_of(words), words.nbytes, rig.device)
            rig.affine(stream, address_of(words), 1024, 2, 1)
            driver.prefetch(stream, address_of(words), words.nbytes, -1)
        rig.finish(stream)
        assert (words == 2 * np.arange(1024) + 1).all()

    def test_advice_is_kept_until_it_is_unset(self, rig: Rig) -> None:
        """Every advice can be read until it is unset, for a device and for the host, and only for its range."""
        if not rig.properties.concurrent_managed_access:
            return  # such a device takes no advice
        words, here = rig.managed(4 * 16384, "u4"), rig.device
        address, part = address_of(words) + 2 * 65536, 65536

        def advise(*advices: tuple[Advice, int]) -> ManagedAttributes:
            for advice, device in advices:
                rig.offload(functools.partial(rig.driver.advise, address, part, advice, device))
            found: ManagedAttributes = rig.offload(lambda: rig.driver.managed_attributes(address, part))
            return found

        nothing = ManagedAttributes()
        assert advise() == nothing
        assert advise(("set_read_mostly", here)).read_mostly
        assert not advise(("unset_read_mostly", here)).read_mostly
        for place in (here, -1):
            assert advise(("set_preferred_location", place)).preferred_location == place
            assert advise(("unset_preferred_location", place)).preferred_location is None
            assert place in advise(("set_accessed_by", place)).accessed_by
            assert place not in advise(("unset_accessed_by", place)).accessed_by
        advise(("set_read_mostly", here))
        whole = rig.offload(lambda: rig.driver.managed_attributes(address_of(words), words.nbytes))
        assert not whole.read_mostly
        assert advise(("unset_read_mostly", here)) == nothing

    def test_last_prefetch_can_be_read(self, rig: Rig) -> None:
        """`managed_attributes` returns the place of the last prefetch."""
        if not rig.properties.concurrent_managed_access:
            return
        words, stream = rig.managed(1024, "u4"), rig.stream()
        words[:] = 1
        for place in (rig.device, -1):
            rig.driver.prefetch(stream, address_of(words), words.nbytes, place)
            rig.finish(stream)
            found = rig.offload(lambda: rig.driver.managed_attributes(address_of(words), words.nbytes))
            assert found.last_prefetch == place

    def test_advice_for_other_memory_is_refused(self, rig: Rig) -> None:
        """`advise` refuses memory that is not managed, without a fault."""
        address = rig.memory(4096)
        with pytest.raises(AiocudaError):
            rig.offload(lambda: rig.driver.advise(address, 4096, "set_read_mostly", rig.device))
        assert rig.driver.fault is None

    def test_prefetch_is_in_stream_order(self, rig: Rig) -> None:
        """A prefetch waits for the earlier work of its stream."""
        if not rig.properties.concurrent_managed_access:
            return  # such a device cannot prefetch memory that the host may use
        words, stream = rig.managed(1024, "u4"), rig.stream()
        words[:] = 1
        hold = rig.hold(stream)
        with rig.unblocked("a prefetch"):
            rig.driver.prefetch(stream, address_of(words), words.nbytes, rig.device)
            rig.affine(stream, address_of(words), 1024, 1, 1)
            rig.driver.prefetch(stream, address_of(words), words.nbytes, -1)
        event = rig.record(stream)
        rig.witness()
        assert not rig.driver.event_query(event)
        assert (words == 1).all()
        hold.release()
        rig.finish_event(event)
        assert (words == 2).all()
