"""Memory adaptors and managed memory in a random program. Checks V2, V6, P17 and P30."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from aiocuda import Operation
from aiocuda.errors import BusyError
from aiocuda.memory import (
    Adaptor,
    FailingResource,
    LimitResource,
    MemoryResource,
    Reservation,
    ScrubbingResource,
    SizeClassResource,
    StatisticsResource,
)
from tests.simulation import internals
from tests.simulation.kernels import AFFINE

if TYPE_CHECKING:
    from aiocuda import Device
    from tests.simulation.actions import Actions

__all__ = ["MemoryAdaptorActions"]

#: The byte that scrubbed memory is filled with. No other content of a program repeats one byte.
_BYTE = 0xA5
_SCRUBBED = np.uint32(0xA5A5A5A5)
_SECRET = 0x12345678

_PLACES: Final[tuple[Literal["device", "host"], ...]] = ("device", "host")


class _FreshRecorder(Adaptor):
    """On top of the pool: remembers which addresses come from it for the first time."""

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self.fresh: set[int] = set()

    def allocate(self, nbytes: int, stream: int) -> int:
        address = self.upstream.allocate(nbytes, stream)
        self.fresh.add(address)
        return address


class _LiveCounter(Adaptor):
    """On top of all other adaptors: counts the bytes that are allocated, and remembers which were used before."""

    def __init__(self, upstream: MemoryResource, fresh: _FreshRecorder) -> None:
        super().__init__(upstream)
        self._fresh = fresh.fresh
        self.live = 0
        #: Allocated addresses that were in use before.
        self.reused: set[int] = set()

    def allocate(self, nbytes: int, stream: int) -> int:
        address = self.upstream.allocate(nbytes, stream)
        self.live += nbytes
        if address not in self._fresh:
            self.reused.add(address)
        return address

    def deallocate(self, address: int, nbytes: int, stream: int) -> None:
        self.upstream.deallocate(address, nbytes, stream)
        self.live -= nbytes
        self._fresh.discard(address)
        self.reused.discard(address)

    def reserve(self, nbytes: int, kind: str) -> Reservation:
        reservation = super().reserve(nbytes, kind)
        self.live += nbytes
        return reservation

    def unreserve(self, reservation: Reservation) -> None:
        super().unreserve(reservation)
        self.live -= reservation.nbytes


class _AdaptorChain:
    """The adaptors between the program and the pool of one device, chosen by chance."""

    def __init__(self, actions: Actions, device: Device) -> None:
        self._memory = device.memory
        self.limit: LimitResource | None = None
        self.scrubbing: ScrubbingResource | None = None
        self.statistics: StatisticsResource | None = None
        self.top: _LiveCounter = device.memory.use(lambda upstream: self._build(actions, upstream))

    def _build(self, actions: Actions, upstream: MemoryResource) -> _LiveCounter:
        fresh = _FreshRecorder(upstream)
        top: MemoryResource = fresh
        errors = actions.checker.errors
        if actions.below(2):
            top = SizeClassResource(top)
        if actions.below(2):
            when = actions.below(3)
            top = self.scrubbing = ScrubbingResource(top, _BYTE, on_free=when < 2, on_allocate=when > 0)
        if actions.below(2):
            top = self.statistics = StatisticsResource(top)
        if actions.below(3) == 0:
            first = 1 + actions.below(12)
            refused = {first, first + 1} if actions.below(2) else {first}
            top = FailingResource(top, allocations=refused, deallocations={1 + actions.below(12)})
            errors.memory_is_limited = True
        if actions.below(2):
            top = self.limit = LimitResource(top, actions.choose([2_000, 100_000, 1_000_000, 1 << 30]))
            errors.memory_is_limited = True
        return _LiveCounter(top, fresh)

    def check(self) -> Iterator[str]:
        """P17: yield the adaptors that count something else than the allocated bytes."""
        live = self.top.live
        if self.limit is not None and self.limit.live_bytes != live:
            yield f"P17 {self.limit!r} counts {self.limit.live_bytes} live bytes, and there are {live}"
        if self._memory.live_bytes != live:
            yield f"P17 {self.top!r} counts {live} live bytes, and the program holds {self._memory.live_bytes}"
        if self.statistics is not None:
            counted = self.statistics.statistics().live_bytes
            if counted != live:
                yield f"P17 {self.statistics!r} counts {counted} live bytes, and there are {live}"


class MemoryAdaptorActions:
    """Actions with adaptors on the pool of each device, and with managed memory."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker
        self._chains = {device: _AdaptorChain(actions, device) for device in actions.devices}
        self._checker.final_checks.append(self._check_end)

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return [self.check_counts, self.reuse, self.reuse, self.use_managed, self.use_managed, self.trim]

    async def check_counts(self) -> None:
        """P17: compare what the adaptors count."""
        for chain in self._chains.values():
            for text in chain.check():
                self._checker.report(text)

    async def trim(self) -> None:
        """Return unused memory to the device."""
        await self._actions.device().memory.trim()

    async def reuse(self) -> None:
        """P30: write, free and allocate again. The new buffer must not have the old content."""
        actions = self._actions
        device = actions.device()
        chain, stream = self._chains[device], actions.stream(device)
        if chain.scrubbing is None:
            return
        actions.count("scrub")
        secret = stream.empty(16, np.uint32)
        actions.follow(stream.fill(secret, _SECRET))
        secret.free(actions.stream(device) if actions.below(3) == 0 else None)
        if actions.below(2):
            await actions.pause()
        again = stream.empty(16, np.uint32)
        is_scrubbed = chain.scrubbing.on_allocate or again.address in chain.top.reused
        content = await actions.follow(stream.download(again))
        if is_scrubbed and not (content == _SCRUBBED).all():
            self._checker.report(f"P30 {again!r} has the content {content!r} when it is allocated")

    async def use_managed(self) -> None:
        """Write managed memory on the host and on the device in turn, with advice and prefetches."""
        actions = self._actions
        device = actions.device()
        count = actions.choose([16, 300])
        buffer, value = device.unified(count, np.uint32), actions.below(1 << 16)
        actions.count("managed")
        buffer.array[:] = value
        stream = actions.stream(device)
        launches: list[Operation[None]] = []
        for _ in range(1 + actions.below(3)):
            choice = actions.below(5)
            if choice == 0:
                await buffer.advise("read_mostly")
            elif choice == 1:
                await buffer.advise("preferred_location", actions.choose(_PLACES))
            elif choice == 2:
                await buffer.unadvise("read_mostly")
            elif choice == 3:
                actions.follow(stream.prefetch(buffer, actions.choose(_PLACES)))
            term = actions.below(1000)
            launch = actions.follow(stream.launch(AFFINE, 1, 32, buffer, count, 3, term))
            launches.append(launch)
            value = (value * 3 + term) & 0xFFFFFFFF
            if actions.below(2):
                await launch
                try:
                    is_equal = bool((np.asarray(buffer) == value).all())
                except BusyError:
                    continue  # a prefetch was enqueued after the launch
                if not is_equal and all(each.state == "done" for each in launches):
                    self._checker.report(f"V2 {buffer!r} does not hold what {launch!r} wrote")
        if actions.below(2):
            buffer.free()

    def _check_end(self) -> Iterator[str]:
        if self._checker.driver.fault is not None:
            return
        for device, chain in self._chains.items():
            yield from chain.check()
            if chain.top.live and not internals.has_exports(device):
                yield f"V6 {chain.top.live} bytes of {chain.top!r} are live after the end"
