"""Memory of a random program that comes through adaptors: P17 and P30 of it; and managed memory that lives long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...completion._operation import Operation
from ...errors import BusyError
from ...memory import (
    Adaptor,
    FailingResource,
    LimitResource,
    MemoryResource,
    ScrubbingResource,
    SizeClassResource,
    StatisticsResource,
)
from .kernels import AFFINE

if TYPE_CHECKING:
    from ..._device import Device
    from .actions import Actions

__all__ = ["Adapted"]

#: What memory is scrubbed with: no content of a program's has all of its bytes alike.
_BYTE = 0xA5
_SCRUBBED = np.uint32(0xA5A5A5A5)
_SECRET = 0x12345678


class _Fresh(Adaptor):
    """On the pool: knows which memory nobody has had before."""

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self.fresh: set[int] = set()

    def allocate(self, nbytes: int, stream: int) -> int:
        address = self.upstream.allocate(nbytes, stream)
        self.fresh.add(address)
        return address


class _Counted(Adaptor):
    """On the limit: what came through it and has not gone back."""

    def __init__(self, upstream: MemoryResource, fresh: _Fresh) -> None:
        super().__init__(upstream)
        self._fresh = fresh.fresh
        self.live = 0
        #: Addresses that somebody had before.
        self.used: set[int] = set()

    def allocate(self, nbytes: int, stream: int) -> int:
        address = self.upstream.allocate(nbytes, stream)
        self.live += nbytes
        if address not in self._fresh:
            self.used.add(address)
        return address

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        self.upstream.deallocate(address, nbytes, stream)
        self.live -= nbytes
        self._fresh.discard(address)
        self.used.discard(address)


class _Chain:
    """What stands in front of one device's pool."""

    def __init__(self, actions: Actions, device: Device) -> None:
        self.limit: LimitResource | None = None
        self.scrubs: ScrubbingResource | None = None
        self.counts: StatisticsResource | None = None
        self.top: _Counted = device.memory.use(lambda upstream: self._build(actions, upstream))

    def _build(self, actions: Actions, upstream: MemoryResource) -> _Counted:
        fresh = _Fresh(upstream)
        top: MemoryResource = fresh
        scarce = actions._checker.heard
        if actions.below(2):
            top = SizeClassResource(top)
        if actions.below(2):
            on = actions.below(3)
            top = self.scrubs = ScrubbingResource(top, _BYTE, on_free=on < 2, on_allocate=on > 0)
        if actions.below(2):
            top = self.counts = StatisticsResource(top)
        if actions.below(3) == 0:
            first = 1 + actions.below(12)
            refused = {first, first + 1} if actions.below(2) else {first}
            top = FailingResource(top, allocations=refused, deallocations={1 + actions.below(12)})
            scarce.scarce = True
        if actions.below(2):
            top = self.limit = LimitResource(top, actions._one([2_000, 100_000, 1_000_000, 1 << 30]))
            scarce.scarce = True
        return _Counted(top, fresh)

    def wrong(self) -> Iterator[str]:
        """P17: what a refused allocation was counted as is not."""
        live = self.top.live
        if self.limit is not None and self.limit.live_bytes != live:
            yield f"P17 {self.limit!r} counts {self.limit.live_bytes} live bytes, and {live} are"
        if self.counts is not None and self.counts.statistics().live_bytes != live:
            yield f"P17 {self.counts!r} counts {self.counts.statistics().live_bytes} live bytes, and {live} are"


class Adapted:
    """Adaptors in front of the pool of each device."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions._checker
        self._chains = {device: _Chain(actions, device) for device in actions._devices}
        self._checker.at_end.append(self._ended)

    def doing(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What a task may do."""
        return [self.look, self.scrubbed, self.scrubbed, self.managed, self.managed, self.trim]

    async def look(self) -> None:
        """Do the figures agree?"""
        for chain in self._chains.values():
            for text in chain.wrong():
                self._checker.found(text)

    async def trim(self) -> None:
        """Give what nobody uses back."""
        await self._actions._device().memory.trim()

    async def scrubbed(self) -> None:
        """P30: what is handed out again does not say what was in it."""
        actions = self._actions
        device = actions._device()
        chain, stream = self._chains[device], actions._stream(device)
        if chain.scrubs is None:
            return
        actions.count("scrub")
        secret = stream.empty(16, np.uint32)
        actions._keep(stream.fill(secret, _SECRET))
        secret.free(actions._stream(device) if actions.below(3) == 0 else None)
        if actions.below(2):
            await actions._pause()
        again = stream.empty(16, np.uint32)
        known = chain.scrubs.on_allocate or again.address in chain.top.used
        found = await actions._keep(stream.download(again))
        if known and not (found == _SCRUBBED).all():
            self._checker.found(f"P30 {again!r} is handed out with {found!r} in it")

    async def managed(self) -> None:
        """Managed memory that the host and the device write in turn, with advice and prefetches meanwhile."""
        actions = self._actions
        device = actions._device()
        count = actions._one([16, 300])
        buffer, value = device.unified(count, np.uint32), actions.below(1 << 16)
        actions.count("managed")
        buffer.array[:] = value
        stream = actions._stream(device)
        operations: list[Operation[None]] = []
        for _ in range(1 + actions.below(3)):
            what = actions.below(5)
            if what == 0:
                await buffer.advise("read_mostly")
            elif what == 1:
                await buffer.advise("preferred_location", actions._one(["device", "host"]))
            elif what == 2:
                await buffer.unadvise("read_mostly")
            elif what == 3:
                actions._keep(stream.prefetch(buffer, actions._one(["device", "host"])))
            term = actions.below(1000)
            operation = actions._keep(stream.launch(AFFINE, 1, 32, buffer, count, 3, term))
            operations.append(operation)
            value = (value * 3 + term) & 0xFFFFFFFF
            if actions.below(2):
                await operation
                try:
                    holds = bool((np.asarray(buffer) == value).all())
                except BusyError:
                    continue  # a prefetch behind it
                if not holds and all(each.state == "done" for each in operations):
                    self._checker.found(f"V2 {buffer!r} does not hold what {operation!r} wrote")
        if actions.below(2):
            buffer.free()

    def _ended(self) -> Iterator[str]:
        if self._checker.driver.fault is not None:
            return
        for device, chain in self._chains.items():
            yield from chain.wrong()
            if chain.top.live and not device.memory.exports.held:  # what others hold then stays allocated
                yield f"V6 {chain.top.live} bytes of {chain.top!r} are live after the end"
