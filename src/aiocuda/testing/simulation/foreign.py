"""Memory of a random program in others' hands: adopted by a stream of ours, or used by somebody without us."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...completion._stream_queue import stream_queue
from ...errors import BusyError
from .kernels import AFFINE

if TYPE_CHECKING:
    from .actions import Actions
    from .content import Tracked

__all__ = ["Foreign"]


class _Exporter:
    """An array of somebody else's, over a buffer of ours."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __dlpack__(self, **options: Any) -> object:
        return self._buffer.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._buffer.__dlpack_device__()
        return device


class _Interfaced:
    """The same, by the older protocol: it names a stream that is behind all that uses it."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        # Without CUDA a buffer has no such attribute, since other libraries would take it.
        self.__cuda_array_interface__ = buffer.device.memory.exports.interface(buffer)


class Foreign:
    """What tasks of a program do with others' arrays."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions._checker
        #: What others use or have used: neither they nor we come behind that by ourselves.
        self._shared: weakref.WeakSet[Tracked] = weakref.WeakSet()

    def doing(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What a task may do."""
        return [self.adopt, self.adopt, self.lend, self.lend, self.interface]

    async def adopt(self) -> None:
        """A stream takes it over, and comes behind all that its producer has enqueued."""
        actions = self._actions
        target = actions._target()
        stream, count = actions._stream(target.device), target.buffer.shape[0]
        try:
            if target in self._shared:
                actions._order(stream, (target, True))
            adopted = stream.adopt(_Exporter(target.buffer))
        except BusyError as error:
            self._checker.heard.error(error)  # the driver may have refused to wait
            return  # else something of it is on the host
        actions.count("adopt")
        before = self._users(target)
        self._shared.add(target)
        for _ in range(1 + actions.below(2)):
            term = actions.below(1000)
            operation = stream.launch(AFFINE, 1, 32, adopted, count, 3, term)
            self._checker.behind(operation, before)
            actions._write(
                stream, target, operation, (target.version,),
                lambda values, term=term: values * np.uint32(3) + np.uint32(term),
            )  # fmt: skip
        if self._frees():
            self._drop(target)
        if actions.below(2):
            adopted.free()
        elif actions.below(2):
            await actions._pause()

    async def interface(self) -> None:
        """By the older protocol nobody is told who uses it: whoever adopts it holds its owner."""
        actions = self._actions
        device, value = actions._device(), actions.below(1 << 16)
        if not device.asynchronous:
            return  # the simulated default stream is 0, which that protocol does not let anybody say; CUDA's is 1
        producer, stream, other = (actions._stream(device) for _ in range(3))
        theirs = producer.empty(300, np.uint32)
        actions._keep(producer.fill(theirs, value))
        try:
            adopted = stream.adopt(_Interfaced(theirs))
        except BusyError as error:
            self._checker.heard.error(error)
            return
        actions.count("interface")
        del theirs
        launched = actions._keep(stream.launch(AFFINE, 1, 32, adopted, 300, 3, 1))
        self._checker.order(actions._keep(other.wait(launched)), launched)
        found = actions._keep(other.download(adopted))
        if actions.below(2):
            adopted.free()
        del adopted
        if not (await found == value * 3 + 1).all():
            self._checker.found(f"V2 {found!r} brought something else than what others had written")

    async def lend(self) -> None:
        """Somebody gets a capsule and a stream, enqueues without us, and lets go of both, perhaps long after us."""
        actions, driver = self._actions, self._checker.driver
        target, value = actions._target(), actions.below(1 << 16)
        stream, count = actions._stream(target.device), target.buffer.shape[0]
        async with stream.lend() as handle:
            if target not in actions._buffers or driver.fault is not None:
                return  # it has been freed meanwhile
            try:
                if target in self._shared:
                    actions._order(stream, (target, True))
                capsule = target.buffer.__dlpack__(stream=handle)
            except BusyError as error:
                self._checker.heard.error(error)
                return
            actions.count("lend")
            self._shared.add(target)
            driver.fill(stream_queue(stream).handle, target.buffer.address, value.to_bytes(4, "little"), count)
            if actions.below(2):
                del capsule
        if self._frees():
            self._drop(target)
        else:
            mark = stream.synchronize()
            actions._write(stream, target, mark, (), lambda: np.full(count, value, np.uint32))
        if actions.below(2):
            await actions._pause()

    @staticmethod
    def _users(target: Tracked) -> list[Any]:
        users = [] if target.writer is None else [target.writer]
        return [user for user in (*users, *target.readers.values()) if user.failure is None]

    def _frees(self) -> bool:
        return self._actions.below(3) == 0 and len(self._actions._buffers) > 3

    def _drop(self, target: Tracked) -> None:
        """Its owner has no use for it any more; who has it has."""
        buffers = self._actions._buffers
        if target in buffers:
            buffers.remove(target)
            if self._actions.below(2):
                target.buffer.free()
