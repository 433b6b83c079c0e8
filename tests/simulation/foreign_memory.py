"""Memory shared with other libraries in a random program: adopted by a stream, or exported and used outside aiocuda."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocuda.errors import BusyError
from tests.simulation import internals
from tests.simulation.kernels import AFFINE

if TYPE_CHECKING:
    from aiocuda import Operation
    from tests.simulation.actions import Actions
    from tests.simulation.buffers import TrackedBuffer

__all__ = ["ForeignMemoryActions"]


class _DlpackArray:
    """The array of another library, in the memory of a buffer of the program."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __dlpack__(self, **options: Any) -> object:
        return self._buffer.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._buffer.__dlpack_device__()
        return device


class _InterfaceArray:
    """The same with ``__cuda_array_interface__``, which names a stream that runs after all users of the memory."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        # Without CUDA a buffer has no such attribute, because other libraries would use it.
        self.__cuda_array_interface__ = buffer.device.memory.exports.interface(buffer)


class ForeignMemoryActions:
    """Actions with arrays of other libraries. Checks V2, V4, V9 and V11."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker
        #: Buffers that another library uses or has used. aiocuda does not order such uses, so the program does.
        self._shared: weakref.WeakSet[TrackedBuffer] = weakref.WeakSet()

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return [self.adopt, self.adopt, self.export, self.export, self.adopt_interface]

    async def adopt(self) -> None:
        """Adopt an array over DLPack. The stream must run after everything that its producer has enqueued."""
        actions = self._actions
        target = actions.target()
        stream, count = actions.stream(target.device), target.buffer.shape[0]
        try:
            if target in self._shared:
                actions.wait_for_users(stream, (target, True))
            adopted = stream.adopt(_DlpackArray(target.buffer))
        except BusyError as error:  # a user of the buffer is still on the host, or the driver has refused the wait
            self._checker.errors.record(error)
            return
        actions.count("adopt")
        before = self._users(target)
        self._shared.add(target)
        for _ in range(1 + actions.below(2)):
            term = actions.below(1000)
            operation = stream.launch(AFFINE, 1, 32, adopted, count, 3, term)
            self._checker.expect_after(operation, before)
            actions.note_write(
                stream, target, operation, (target.version,),
                lambda values, term=term: values * np.uint32(3) + np.uint32(term),
            )  # fmt: skip
        if self._may_drop():
            self._drop(target)
        if actions.below(2):
            adopted.free()
        elif actions.below(2):
            await actions.pause()

    async def adopt_interface(self) -> None:
        """Adopt an array by ``__cuda_array_interface__``, then drop its owner: the adopted buffer must hold it."""
        actions = self._actions
        device, value = actions.device(), actions.below(1 << 16)
        if not device.asynchronous:
            return  # the simulated default stream is 0, which that protocol does not allow; on CUDA it is 1
        producer, stream, other = (actions.stream(device) for _ in range(3))
        owner = producer.empty(300, np.uint32)
        actions.follow(producer.fill(owner, value))
        try:
            adopted = stream.adopt(_InterfaceArray(owner))
        except BusyError as error:
            self._checker.errors.record(error)
            return
        actions.count("interface")
        del owner
        launched = actions.follow(stream.launch(AFFINE, 1, 32, adopted, 300, 3, 1))
        self._checker.expect_wait(actions.follow(other.wait(launched)), launched)
        download = actions.follow(other.download(adopted))
        if actions.below(2):
            adopted.free()
        del adopted
        if not (await download == value * 3 + 1).all():
            self._checker.report(f"V2 {download!r} has other bytes than its producer wrote")

    async def export(self) -> None:
        """Export a buffer and lend a stream; a caller outside aiocuda enqueues a fill, and drops both later."""
        actions, driver = self._actions, self._checker.driver
        target, value = actions.target(), actions.below(1 << 16)
        stream, count = actions.stream(target.device), target.buffer.shape[0]
        async with stream.lend() as handle:
            if target not in actions.buffers or driver.fault is not None:
                return  # another task has freed the buffer
            try:
                if target in self._shared:
                    actions.wait_for_users(stream, (target, True))
                capsule = target.buffer.__dlpack__(stream=handle)
            except BusyError as error:
                self._checker.errors.record(error)
                return
            actions.count("lend")
            self._shared.add(target)
            handle = internals.queue_of_stream(stream).handle
            driver.fill(handle, target.buffer.address, value.to_bytes(4, "little"), count)
            if actions.below(2):
                del capsule
        if self._may_drop():
            self._drop(target)
        else:
            filled = stream.synchronize()
            actions.note_write(stream, target, filled, (), lambda: np.full(count, value, np.uint32))
        if actions.below(2):
            await actions.pause()

    @staticmethod
    def _users(target: TrackedBuffer) -> list[Operation[Any]]:
        users = [] if target.writer is None else [target.writer]
        return [user for user in (*users, *target.readers.values()) if not internals.has_failed(user)]

    def _may_drop(self) -> bool:
        return self._actions.below(3) == 0 and len(self._actions.buffers) > 3

    def _drop(self, target: TrackedBuffer) -> None:
        """Drop a buffer, perhaps freeing it first. The other library keeps its memory."""
        buffers = self._actions.buffers
        if target in buffers:
            buffers.remove(target)
            if self._actions.below(2):
                target.buffer.free()
