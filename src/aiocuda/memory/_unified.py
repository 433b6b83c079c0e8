"""Unified buffers: managed memory, with one address for the host and the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from ..driver.protocol import Advice
from ..errors import AiocudaError, InvalidArgumentError, InvalidTypeError, UnsupportedError, WrongDeviceError
from ._buffer import DeviceBuffer
from ._migrations import HOST, Migration, Use

if TYPE_CHECKING:
    from ..completion._device_state import DeviceState
    from ._managed import ManagedBlock, ManagedPool

__all__ = ["AdviceName", "PrefetchSuggestion", "UnifiedBuffer", "place_of"]

#: What `UnifiedBuffer.advise` takes.
AdviceName: TypeAlias = Literal["read_mostly", "preferred_location", "accessed_by"]


class PrefetchSuggestion(NamedTuple):
    """A prefetch that would avoid a move on demand; see `UnifiedBuffer.suggest_prefetch`.

    Attributes
    ----------
    buffer
        The buffer to prefetch.
    to
        The target: a device's index.
    before
        The operation to prefetch before: ``"launch saxpy"``.
    nbytes
        Bytes that moved on demand the last time.
    seen
        How often that happened.
    why
        The reason, as a sentence.
    """

    buffer: UnifiedBuffer
    to: int
    before: str
    nbytes: int
    seen: int
    why: str


class UnifiedBuffer(DeviceBuffer):
    """Managed memory: one address for the host and the device.

    Made by `aiocuda.Device.unified`. ``cuMemAllocManaged``. The same interface as `DeviceBuffer`, and NumPy views for
    the host: `array` to write it, ``np.asarray(buffer)`` to read it. Memory moves to the processor that accesses it;
    `prefetch <aiocuda.Stream.prefetch>` moves it before, and `advise` informs the driver how it will be used.
    """

    __slots__ = ()

    @property
    def _pool(self) -> ManagedPool:
        return cast("ManagedPool", self._memory)

    @property
    def _managed(self) -> ManagedBlock:
        return cast("ManagedBlock", self._block)

    # -- host views ----------------------------------------------------------------------------------------------

    @property
    def array(self) -> npt.NDArray[Any]:
        """The memory as a writable NumPy array; ``np.asarray(buffer)`` is read-only.

        The record of migrations counts each access to this property as a write by the host: use the property again for
        each new write.

        Raises
        ------
        BusyError
            The device works, and the hardware does not allow the host to access managed memory at the same time
            (``concurrentManagedAccess`` is 0): await the named operation. On such hardware the array checks again at
            each access, also later; accesses that bypass NumPy, such as a memoryview, are not checked.
        """
        return self._host_view("array", writes=True)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise InvalidTypeError("the host writes managed memory through NumPy: `buffer.array[…] = value`")

    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> Any:
        view = self._host_view("asarray", writes=False)
        if not self._pool.properties.concurrent_managed_access:
            if copy is False:
                raise ValueError("this hardware needs a guarded view, which `array` is; without one there is a copy")
            return np.array(view.view(np.ndarray), dtype=dtype, copy=True)
        view.flags.writeable = False
        return np.array(view, dtype=dtype, copy=copy)

    def _host_view(self, operation: str, writes: bool) -> npt.NDArray[Any]:
        """Return an array over the memory, and record the access of the host."""
        pool = self._pool
        pool.check(self._managed)
        view: npt.NDArray[Any] = pool.host_view(self._managed, self._offset, self.shape, self.dtype)
        self._used(HOST, operation, writes=writes)
        return view

    # -- migrations ----------------------------------------------------------------------------------------------

    def _used(
        self, place: int, operation: str, *, reads: bool = True, writes: bool = True, asked: bool = False
    ) -> None:
        """Record a use at a place: a device's index, or `HOST`. ``asked`` means that a prefetch is the use."""
        if self.nbytes:
            use = Use(self._offset, self.shape, self.dtype, self.nbytes, place, reads, writes, operation)
            self._managed.migrations.used(use, self._pool.driver.now(), asked)

    def migrations(self) -> tuple[Migration, ...]:
        """Return the last 256 migrations of this memory between host and devices.

        They are inferred from the order of uses: prefetches, kernels (an argument for a ``const`` pointer is read),
        copies, fills, and the host's `array` and ``np.asarray``; and from the advice. The hardware may behave
        differently. Slices and views of one allocation share the record.
        """
        return self._managed.migrations.past()

    def suggest_prefetch(self) -> tuple[PrefetchSuggestion, ...]:
        """Return a prefetch that would save time, or an empty tuple.

        A prefetch is suggested if the host wrote and a device then read at least twice, so that the memory moved on
        demand while the kernel waited. There is no suggestion if a prefetch moves the memory already, if it does not
        move (only one side uses it, or advice prevents it), or for less than a page.
        """
        wanted = self._managed.migrations.wanted()
        if wanted is None:
            return ()
        use, nbytes, seen = wanted
        buffer = UnifiedBuffer(self._memory, self._block, use.offset, use.shape, use.dtype)
        return (
            PrefetchSuggestion(
                buffer=buffer,
                to=use.place,
                before=use.operation,
                nbytes=nbytes,
                seen=seen,
                why=(
                    f"{seen} times the host wrote {buffer!r} and device {use.place} then read it: {nbytes:,} bytes "
                    f"moved on demand during the last {use.operation!r}. Before that, "
                    f"`stream.prefetch(buffer, {use.place})`"
                ),
            ),
        )

    # -- advice --------------------------------------------------------------------------------------------------

    async def advise(self, advice: AdviceName, to: Any = None) -> None:
        """Inform the driver how this memory will be used. ``cuMemAdvise``, on a worker thread.

        The advice is in no stream's order: it applies when this returns. It applies to the memory's pages, and ends
        with `unadvise` or with the buffer.

        Parameters
        ----------
        advice
            ``"read_mostly"``: it is read much more often than written; each processor that reads it gets a copy.
            ``"preferred_location"``: it stays at this place, also in the memory of another device, if the processors
            that use it can access it there.
            ``"accessed_by"``: this processor accesses it without moving it.
        to
            The place or processor: ``"device"`` for the buffer's own (the default), ``"host"``, a `Device`, or a
            device's index. ``"read_mostly"`` takes none.

        Raises
        ------
        UnsupportedError
            The device takes no such advice (``concurrentManagedAccess`` is 0).
        WrongDeviceError
            A `Device` of another driver.
        InvalidArgumentError, InvalidTypeError
            No such advice, or no such place.
        """
        await self._advise(advice, to, True)

    async def unadvise(self, advice: AdviceName, to: Any = None) -> None:
        """Withdraw an advice; for ``"accessed_by"``, that for one processor. Parameters as in `advise`."""
        await self._advise(advice, to, False)

    async def _advise(self, advice: AdviceName, to: Any, setting: bool) -> None:
        block, pool = self._managed, self._pool
        block.check()
        if not isinstance(advice, str) or advice not in get_args(AdviceName):
            raise InvalidArgumentError(f"there is no advice {advice!r}: there are {', '.join(get_args(AdviceName))}")
        own = pool.device_state.device
        if to is not None and (advice == "read_mostly" or (advice == "preferred_location" and not setting)):
            raise InvalidArgumentError(
                f"{'' if setting else 'taking back '}{advice!r} names no place: leave {to!r} out"
            )
        place = place_of("device" if to is None else to, pool.device_state, "advised")
        if place == own and not pool.properties.concurrent_managed_access and advice != "read_mostly":
            raise UnsupportedError(
                f"{pool.properties.name} takes no advice {advice!r}: it has no concurrent managed access "
                "(device.properties.concurrent_managed_access)"
            )
        reactor = pool.reactor()
        if not self.nbytes:
            return
        verb = cast("Advice", f"{'set' if setting else 'unset'}_{advice}")
        address, nbytes, offset = self.address, self.nbytes, self._offset
        job = object()

        def work() -> None:
            try:
                pool.driver.advise(address, nbytes, verb, place)
                block.migrations.advised(offset, nbytes, verb, place)
            finally:
                block.advising.discard(job)

        block.advising.add(job)
        if setting:
            undo = cast("Advice", f"unset_{advice}")
            pool.advised.setdefault(block.address, set()).add((undo, place))
        try:
            await reactor.jobs.run(work)
        except AiocudaError:
            block.advising.discard(job)  # the job may not have started
            raise


def place_of(to: Any, device_state: DeviceState, done: str) -> int:
    """Return the place to prefetch to, or to advise about: a device's index, or `HOST`."""
    if isinstance(to, str):
        if to not in ("device", "host"):
            raise InvalidArgumentError(f"memory is {done} for 'device', 'host', a Device or its index, not {to!r}")
        return HOST if to == "host" else device_state.device
    if getattr(to, "driver", device_state.driver) is not device_state.driver:
        raise WrongDeviceError(f"{to!r} belongs to another driver")
    index = getattr(to, "index", to)
    if not isinstance(index, int) or isinstance(index, bool):
        raise InvalidTypeError(f"memory is {done} for 'device', 'host', a Device or its index, not {to!r}")
    if not 0 <= index < device_state.device_count:
        raise InvalidArgumentError(
            f"there is no device {index}: this machine has {device_state.device_count}", index=index
        )
    return index
