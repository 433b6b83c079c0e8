"""Unified buffers: managed memory, one address for the host and the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from ..driver.protocol import Advice
from ..errors import AiocudaError, InvalidArgumentError, InvalidTypeError, UnsupportedError, WrongDeviceError
from ._buffer import DeviceBuffer
from ._dlpack import CUDA_MANAGED
from ._migrations import HOST, Migration, PrefetchSuggestion, Use

if TYPE_CHECKING:
    from ..completion._device_state import DeviceState
    from ._managed import ManagedBlock, ManagedPool

__all__ = ["AdviceName", "UnifiedBuffer", "place_of"]

#: What `UnifiedBuffer.advise` takes.
AdviceName: TypeAlias = Literal["read_mostly", "preferred_location", "accessed_by"]


class UnifiedBuffer(DeviceBuffer):
    """Managed memory: one address for the host and the device.

    Made by `aiocuda.Device.unified`. ``cuMemAllocManaged``. The same interface as `DeviceBuffer`, and NumPy views for
    the host: `array` to write it, ``np.asarray(buffer)`` to read it. Memory moves to whoever touches it; `prefetch
    <aiocuda.Stream.prefetch>` brings it there before, and advice says how it will be used.
    """

    __slots__ = ()

    _device_type = CUDA_MANAGED

    @property
    def _pool(self) -> ManagedPool:
        return cast("ManagedPool", self._memory)

    @property
    def _managed(self) -> ManagedBlock:
        return cast("ManagedBlock", self._block)

    # -- the host's side -----------------------------------------------------------------------------------------

    @property
    def array(self) -> npt.NDArray[Any]:
        """The memory as a NumPy array, to be written; ``np.asarray(buffer)`` is read-only.

        For the record of migrations each call is a write by the host: take it anew where you write anew.

        Raises
        ------
        BusyError
            The device is at work, and the hardware does not let the host look meanwhile (``concurrentManagedAccess``
            is 0): await the operation that is named. There the array asks again at each access, also later; what goes
            past NumPy, such as a memoryview, cannot be guarded.
        """
        return self._look("array", writes=True)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise InvalidTypeError("the host writes managed memory through NumPy: `buffer.array[…] = value`")

    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> Any:
        view = self._look("asarray", writes=False)
        if not self._pool.properties.concurrent_managed_access:
            if copy is False:
                raise ValueError("this hardware needs a guarded view, which `array` is; without one there is a copy")
            return np.array(view.view(np.ndarray), dtype=dtype, copy=True)
        view.flags.writeable = False
        return np.array(view, dtype=dtype, copy=copy)

    def _look(self, operation: str, writes: bool) -> npt.NDArray[Any]:
        pool = self._pool
        pool.check(self._managed)
        view: npt.NDArray[Any] = pool.host_view(self._managed, self._offset, self.shape, self.dtype)
        self._used(HOST, operation, writes=writes)
        return view

    # -- what is known of where it is ----------------------------------------------------------------------------

    def _used(
        self, place: int, operation: str, *, reads: bool = True, writes: bool = True, asked: bool = False
    ) -> None:
        """Somebody is about to use it there."""
        if self.nbytes:
            use = Use(self._offset, self.shape, self.dtype, self.nbytes, place, reads, writes, operation)
            self._managed.migrations.used(use, self._pool.driver.now(), asked)

    def migrations(self) -> tuple[Migration, ...]:
        """When this memory moved between host and devices, from where to where, and how much: the last 256 times.

        Inferred from the order of uses: prefetches, kernels (an argument for a ``const`` pointer is read), copies,
        fills, and the host's `array` and ``np.asarray``; and from the advice. The hardware is not asked, and may do
        otherwise. Slices and views of one allocation share the record.
        """
        return self._managed.migrations.past()

    def suggest_prefetch(self) -> tuple[PrefetchSuggestion, ...]:
        """A prefetch that would save time; empty if nothing is known to gain.

        It is suggested where at least twice the host wrote and a device then read, so that the memory moved on demand
        while the kernel waited. Not where a prefetch moves it already, where it does not move (only one side uses it,
        or by advice), nor for less than a page.
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
        """Say how this memory will be used. ``cuMemAdvise``, on a worker thread.

        It is not in the order of any stream: it holds from when this returns. It belongs to the memory's pages, not to
        this object, and ends with `unadvise` or with the buffer.

        Parameters
        ----------
        advice
            ``"read_mostly"``: it is read much more often than written; whoever reads it gets a copy of his own.
            ``"preferred_location"``: where it is to stay, if it can be reached from elsewhere.
            ``"accessed_by"``: who is to reach it without moving it.
        to
            Where, or who: ``"device"`` for the buffer's own (if left out), ``"host"``, a `Device`, or a device's
            index. ``"read_mostly"`` takes none.

        Raises
        ------
        UnsupportedError
            The device takes no such advice (``concurrentManagedAccess`` is 0).
        InvalidArgumentError, InvalidTypeError
            No such advice, or no such place.
        """
        await self._advise(advice, to, True)

    async def unadvise(self, advice: AdviceName, to: Any = None) -> None:
        """Take an advice back. Of ``"accessed_by"`` that for one place, else all of it. As `advise`."""
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
        reactor = pool.device._loop_state().reactor
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
            block.advising.discard(job)  # perhaps no thread has begun it
            raise


def place_of(to: Any, device_state: DeviceState, done: str) -> int:
    """Where memory is to be prefetched to, or advised about: a device's index, or -1 for the host."""
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
