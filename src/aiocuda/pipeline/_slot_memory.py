"""SlotMemory: the buffers and the pinned arrays of a slot, which serve one item after another."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from sys import getrefcount
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .._base._scope import Scope
from ..completion import Operation
from ..coordination import Node, unfinished_nodes
from ..device import Device
from ..errors import AiocudaError
from ..lowlevel import Block, StreamOperation, block_of, pinned_block_of, resources_of
from ..memory import DeviceBuffer, PinnedBuffer
from ..stream import Stream

if TYPE_CHECKING:
    from ._replay import Replay

__all__ = ["Asked", "SlotMemory"]

#: A key of `SlotMemory.pinned` (True) or `SlotMemory.buffers` (False).
Key: TypeAlias = tuple[bool, str]

#: A key of `SlotMemory.asked`: the name of a buffer, or a key of a pinned array.
Asked: TypeAlias = str | Key

#: The reference count, in the form in which it is asked for here, of an object that only a list holds. It includes the
#: references of the call; their number depends on Python's version.
(_LISTED,) = map(getrefcount, [object()])

#: That of an owner: `SlotMemory.owners` and one other object hold it.
_OWN = _LISTED + 1


class SlotMemory:
    """The memory of a slot. Each block serves one item after another, unless anything else refers to it.

    A view that lives longer than its item would change when the slot computes the next one. So the slot lets go of a
    block that anything else refers to (`renew`), and the next use of its name allocates another one. All references to
    memory go to one of its *owners*: a buffer and its block, or a pinned array and the arrays that it is a view of.
    Their reference counts show whether there are any.

    Attributes
    ----------
    buffers : dict of str to DeviceBuffer
    requests : dict of str to tuple
        For each buffer, the shape and dtype of the last request and the buffer itself, if both are immutable.
    pinned : dict of str to PinnedBuffer
    replays : dict of str to Replay
        The captured work of the stages that are replayed, by the stage's name. It uses the addresses of the memory.
    owners : list
        The owners of all blocks.
    own : list of int
        The reference counts of the owners if nothing but the slot refers to them.
    asked : dict
        In a pipeline, the first stage that has asked for each block for the present item: see
        `PipelineItem.asking_stage`.
    scope : Scope or None
        That of the `TripleBuffer` which has made ``buffers`` and frees them; None if the slot makes them itself.
    """

    __slots__ = ("_captured", "_device", "_keys", "_lost", "_stream", "asked", "buffers", "own", "owners", "pinned",
                 "replays", "requests", "scope")  # fmt: skip

    def __init__(self) -> None:
        self.buffers: dict[str, DeviceBuffer] = {}
        self.requests: dict[str, tuple[object, object, DeviceBuffer]] = {}
        self.pinned: dict[str, PinnedBuffer] = {}
        self.asked: dict[Asked, str | int] = {}
        self.replays: dict[str, Replay] = {}
        self.owners: list[object] = []
        self.own: list[int] = []
        self.scope: Scope | None = None
        self._stream: Stream | None = None  # of the `TripleBuffer` that has made `buffers`
        self._device: Device | None = None
        self._keys: list[Key] = []  # of the owners
        self._captured: Counter[int] = Counter()  # the references of `replays` to an owner, by its id
        #: Shape and dtype of the buffers that the slot has let go of.
        self._lost: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def give(self, stream: Stream, buffers: dict[str, DeviceBuffer], scope: Scope) -> None:
        """Take the buffers of a `TripleBuffer`, which it has allocated in its stream, and frees by `free_given`."""
        self._stream, self.buffers, self.scope = stream, buffers, scope

    def given(self, name: str) -> DeviceBuffer | None:
        """Return a buffer of the `TripleBuffer`, allocated again if the slot has let go of it; None if there is none.

        Raises
        ------
        DeviceOutOfMemory
            The device has not enough memory for another buffer.
        """
        if name in self._lost and self._stream is not None:
            self.buffers[name] = self._stream.empty(*self._lost[name])
            del self._lost[name]
        return self.buffers.get(name)

    def free_given(self, after: Iterable[Operation[Any]]) -> None:
        """Free the buffers of the `TripleBuffer`, on the device behind all their uses and these operations."""
        buffers, self.buffers = self.buffers, {}
        self.free()
        for buffer in buffers.values():
            if not buffer.freed:
                for operation in after:
                    with contextlib.suppress(AiocudaError):  # of another driver, or recorded into a graph
                        buffer.add_dependency(operation)
                buffer.free()

    def replace(self) -> None:
        """Let go of all memory, which goes back when the device is done with it. The next request allocates."""
        for name in tuple(self.buffers):
            self._let_go((False, name))
        self.free()

    def in_use(self, *, fixed: bool = False) -> Iterator[StreamOperation[Any] | Node[Any]]:
        """Yield the unfinished operations and nodes that use the memory.

        With ``fixed``, only those of memory that `renew` cannot let go of.

        Exports to other libraries do not count: an array may live as long as the slot.
        """
        for key in (*((False, name) for name in self.buffers), *((True, name) for name in self.pinned)):
            block = self._block(key)
            if block is None or (fixed and not self._is_fixed(block)):
                continue
            for operation in block.unfinished():
                # The first use waits for the allocation, on the device.
                if isinstance(operation, StreamOperation) and operation is not block.allocation_event:
                    yield operation
            yield from unfinished_nodes(self.pinned[key[1]] if key[0] else block)

    def note_block(self, device: Device) -> None:
        """Note that there is another block, on this device."""
        self._device = device
        self._note_change()

    def note_request(self, name: str, request: tuple[object, object, DeviceBuffer] | None) -> None:
        """Note the last request for a buffer; None if its shape or dtype may change."""
        if request is not None:
            self.requests[name] = request
        elif self.requests.pop(name, None) is not None:
            self._note_change()  # else a reference of the program would count as that of the request

    def _note_change(self) -> None:
        self.owners, self.own = [], [-1]  # they differ, so that `renew` finds the owners

    def lost(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Return shape and dtype of a buffer that the slot has let go of; None if there was no such buffer."""
        return self._lost.get(name)

    def capture(self, stage: str, make: Callable[[], Replay]) -> Replay:
        """Return the captured work of a stage, which ``make`` makes. The slot owns what it refers to."""
        before = self._excess()
        work = self.replays[stage] = make()
        self._captured.update(self._excess())
        self._captured.subtract(before)
        self._note_change()
        return work

    def forget_replays(self) -> None:
        """Close the captured work. A stage that needs it again captures it again."""
        for replay in self.replays.values():
            replay.close()
        self.replays.clear()
        self._captured.clear()
        self._note_change()

    def free(self) -> None:
        """Release all memory. A buffer returns to its pool after the last operation that uses it."""
        self.forget_replays()
        if self.scope is None:
            self.buffers.clear()
            self._lost.clear()
        self.requests.clear()
        self.pinned.clear()
        self._find_owners()

    # -- other references ----------------------------------------------------------------------------------------

    def renew(self) -> int:
        """Let go of the blocks that anything else refers to, and return their number.

        They go back to their pools when nothing refers to them. The buffers of a `TripleBuffer` stay.
        """
        if [*map(getrefcount, self.owners)] == self.own:
            return 0
        self._find_owners()
        held = [key for key in self._held() if (key[0] or self.scope is None) and not self._is_fixed(self._block(key))]
        if held:
            self.forget_replays()
            for key in held:
                self._let_go(key)
            self._find_owners()
        return len(held)

    def of_graphs(self) -> tuple[list[PinnedBuffer], list[DeviceBuffer]]:
        """Return the memory that a graph of the program uses. The slot cannot let go of it."""
        return (
            [array for name, array in self.pinned.items() if self._is_fixed(self._block((True, name)))],
            [buffer for name, buffer in self.buffers.items() if self._is_fixed(self._block((False, name)))],
        )

    def _let_go(self, key: Key) -> None:
        is_pinned, name = key
        if is_pinned:
            del self.pinned[name]
        else:
            buffer = self.buffers.pop(name)
            self.requests.pop(name, None)
            self._lost[name] = buffer.shape, buffer.dtype

    def _find_owners(self) -> None:
        """Find the owners, and how many references the slot has to each."""
        self.owners, self._keys, self.own = [], [], []
        for name, array in self.pinned.items():
            if not array.freed:
                for each in _with_bases(array):
                    self._add_owner((True, name), each)
        for name, buffer in self.buffers.items():
            if not buffer.freed:
                request = self.requests.get(name)
                self._add_owner((False, name), buffer, 1 if request is not None and request[2] is buffer else 0)
                self._add_owner((False, name), block_of(buffer))

    def _add_owner(self, key: Key, owner: object, more: int = 0) -> None:
        self.owners.append(owner)
        self._keys.append(key)
        self.own.append(_OWN + more + self._captured[id(owner)])

    def _excess(self) -> dict[int, int]:
        """Return the number of references that are not the slot's own, by the id of the owner."""
        self._find_owners()
        counts = [*map(getrefcount, self.owners)]
        return {id(owner): count - own for owner, count, own in zip(self.owners, counts, self.own, strict=True)}

    def _held(self) -> list[Key]:
        """Return the keys of the blocks that anything else refers to."""
        if not self._counted():
            return []
        self._drop_unneeded()
        held = self._counted()
        for key in held:
            is_pinned, name = key
            if not is_pinned:  # another library has released it, and an operation holds it until its work is done
                held[key] -= len(block_of(self.buffers[name]).dependencies or ())
        return [key for key, count in held.items() if count > 0]

    def _drop_unneeded(self) -> None:
        """Let the device drop arrays that other libraries have released."""
        if self._device is not None:
            with contextlib.suppress(AiocudaError):  # closed, or faulted
                self._device.memory.sweep(resources_of(self._device).open_reactor())

    def _counted(self) -> Counter[Key]:
        """Return the number of references that are not the slot's own, by key."""
        found: Counter[Key] = Counter()
        for at, count in enumerate([*map(getrefcount, self.owners)]):
            if count > self.own[at]:
                found[self._keys[at]] += count - self.own[at]
            else:
                self.own[at] = count  # captured work has dropped a reference
        return found

    def _block(self, key: Key) -> Block | None:
        is_pinned, name = key
        return pinned_block_of(self.pinned[name]) if is_pinned else block_of(self.buffers[name])

    def _is_fixed(self, block: Block | None) -> bool:
        """True if a graph of the program uses the block: it would go on using it when the slot has another one."""
        return block is not None and bool(block.graphs - {replay.graph for replay in self.replays.values()})


def _with_bases(array: Any) -> Iterator[Any]:
    """Yield an array, and the arrays that it is a view of."""
    while isinstance(array, np.ndarray):
        yield array
        array = array.base
