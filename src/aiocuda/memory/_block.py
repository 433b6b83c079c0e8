"""Block: one allocation, and the operations that use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakSet

from .._core import BlockFields
from ..errors import ClosedError, StaleHandleError
from ._accesses import Ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._core import Ring, StreamOperation
    from ._region import Region

__all__ = ["MANY_USES", "Block", "DroppedBlock", "ExternalUse"]

#: Entries of `Block.uses` or `Block.peers` above which the passed ones are removed. Streams come and go, and a buffer
#: may outlive them.
MANY_USES = 8


class DroppedBlock(NamedTuple):
    """The record that a finaliser leaves of a block, so that a sweep frees its memory."""

    address: int
    nbytes: int
    allocation_event: StreamOperation[Any] | None


class ExternalUse:
    """A use of a block by another library: no event marks its end until that library releases the block.

    `Block.peers` holds it in the place of an operation. It has the two attributes of an operation that a free reads.
    """

    __slots__ = ("is_settled",)

    #: There is no event that a free could wait for.
    lease = None

    def __init__(self) -> None:
        self.is_settled = False

    def end(self) -> None:
        """The other library has released the block."""
        self.is_settled = True


class _DependencyRelease:
    """Callback of an operation that has passed: it removes the operation from the dependencies of blocks.

    It replaces the operation's previous callback, and calls that one afterwards.
    """

    __slots__ = ("_operation", "_previous", "blocks")

    def __init__(self, operation: StreamOperation[Any], previous: Callable[[], object] | None) -> None:
        self._operation = operation
        self._previous = previous
        self.blocks: list[Block] = []

    def __call__(self) -> None:
        for block in self.blocks:
            if block.dependencies is not None:
                block.dependencies.pop(self._operation, None)
        if self._previous is not None:
            self._previous()


class Block(BlockFields):
    """A range of memory that is allocated and freed as a whole. Buffers and their slices are views of it.

    `BlockFields` has the attributes.
    """

    __slots__ = ("_graphs", "_has_interface", "_is_kept", "_why_freed")

    def allocated_by(self, operation: StreamOperation[Any]) -> None:
        """The allocation comes before this operation, in the same stream: first uses in others wait for it."""
        self.allocation_event = operation

    def forget_allocation(self) -> None:
        """The allocation has passed: no stream waits for it any more."""
        self.allocation_event = None

    def begin_locking(self, region: Region) -> None:
        """The memory is being page-locked: each use passes the check until `end_locking`."""
        self.region = region
        self.ready = False

    def end_locking(self) -> None:
        """The memory is page-locked."""
        self.region = None
        self.ready = True

    def forget(self, queue: Ring, operation: StreamOperation[Any]) -> None:
        """Refer to an operation that has passed no longer: its result may be a buffer of the block."""
        if self.uses.get(queue) is operation:
            del self.uses[queue]
        if self.allocation_event is operation:
            self.allocation_event = None

    def used_by_peer(self, queue: Ring, operation: StreamOperation[Any]) -> None:
        """Record a copy from or to the block by a queue of another device."""
        if self.peers is None:
            self.peers = {}
        elif len(self.peers) >= MANY_USES:
            self.unfinished()  # removes the entries that have passed
        self.peers[queue] = operation

    def begin_external_use(self, use: ExternalUse) -> None:
        """Record a use by another library. It is its own key in `peers`."""
        self.used_by_peer(cast("Ring", use), cast("StreamOperation[Any]", use))

    @property
    def is_exported(self) -> bool:
        """True while another library holds the block."""
        if not self.peers:
            return False
        return any(isinstance(use, ExternalUse) and not use.is_settled for use in list(self.peers.values()))

    def end_external_use(self, use: ExternalUse) -> None:
        """The other library has released the block."""
        use.end()
        if self.peers is not None:
            self.peers.pop(cast("Ring", use), None)

    @property
    def is_kept(self) -> bool:
        """True if `DeviceMemory.free_all` leaves the block: it is not the program's alone, or a live graph uses it."""
        return hasattr(self, "_is_kept") or bool(self.graphs)

    def keep(self) -> None:
        """Let `DeviceMemory.free_all` leave the block: a package has allocated it through a stream of the program."""
        self._is_kept = True

    @property
    def has_interface(self) -> bool:
        """True if ``__cuda_array_interface__`` has exported the address."""
        return hasattr(self, "_has_interface")

    def note_interface(self) -> None:
        """Note that ``__cuda_array_interface__`` has exported the address. The protocol does not report the end."""
        self._has_interface = True

    def assign(self) -> None:
        """Give the memory to another purpose: its content is undefined, as after an allocation."""
        self.assigned += 1
        if self.poison:
            self.poison.clear()

    def poisoned(self) -> defaultdict[Any, Ranges[Any]]:
        """Return `poison`, which makes the entry of a graph at its first use."""
        if self.poison is None:
            self.poison = defaultdict(Ranges)
        return self.poison

    def explain(self, why: str) -> None:
        """Let the error of `check` say why the block is freed, and the cure: a package frees it for the program."""
        self._why_freed = why

    #: Set by `note_interface`, `keep` and `explain`.
    _has_interface: bool
    _is_kept: bool
    _why_freed: str
    #: Set by the first graph: most blocks have none, and are made faster without it.
    _graphs: WeakSet[Any]

    @property
    def graphs(self) -> AbstractSet[object]:
        """The live graphs that use the block, by its address."""
        return getattr(self, "_graphs", frozenset())

    def enter_graph(self, graph: object) -> None:
        """Note that a graph uses the block, until `leave_graph`, or until nothing holds the graph."""
        if not hasattr(self, "_graphs"):
            self._graphs = WeakSet()
        self._graphs.add(graph)

    def leave_graph(self, graph: object) -> None:
        """Note that a graph does not use the block any more."""
        self._graphs.discard(graph)

    def check(self) -> None:
        """Raise `StaleHandleError` if the block has been freed, or its device closed."""
        if self.freed:
            if hasattr(self, "_why_freed"):
                raise StaleHandleError(f"{self} has been freed, since {self._why_freed}")
            raise StaleHandleError(
                f"{self} has been freed: allocate another one, or free this one after its last use; no wait is needed, "
                "since a free takes place after all work that was enqueued before it"
            )
        if self.owner.closed:
            raise StaleHandleError(f"{self} was freed with its device, which has been closed: download its data before")

    def awaited(self) -> list[StreamOperation[Any]]:
        """Return the operations that use the block, or that have allocated it, for `aiocuda.wait`."""
        if self.owner.closed:
            raise ClosedError(f"{self} was freed with its device, which has been closed")
        self.check()
        return [operation for operation in self.unfinished() if not isinstance(operation, ExternalUse)]

    @property
    def in_use(self) -> bool:
        """True while something uses the memory."""
        return bool(self.unfinished())

    def depend(self, operation: StreamOperation[Any]) -> None:
        """Delay the free of the block until the operation has passed.

        Until it has passed, the operation holds the block, so the block's finaliser does not run earlier. Then the
        block drops the operation, so the operation's result does not live as long as the memory.
        """
        if operation.is_settled or (self.dependencies is not None and operation in self.dependencies):
            return
        if self.dependencies is None:
            self.dependencies = {}
        self.dependencies[operation] = None
        release = operation.on_settled
        if not isinstance(release, _DependencyRelease):
            release = operation.on_settled = _DependencyRelease(operation, release)
        release.blocks.append(self)

    def clear_dependencies(self) -> None:
        """Forget the operations that `depend` has added."""
        self.dependencies = None

    def __str__(self) -> str:
        made = "" if self.shape is None else f"of shape {self.shape} {self.dtype} "
        return f"the buffer {made}at {self.address:#x} ({self.nbytes} bytes)"

    def __del__(self) -> None:
        # Every operation that used the block has passed: unfinished ones hold the block. A finaliser may run on any
        # thread, at any point of the program, so it only appends a record; a sweep of the loop frees the memory. After
        # a fault there are no sweeps, and the allocation event of an upload would hold the uploaded array.
        if not self.freed and self.nbytes and self.driver.fault is None:
            self.owner.dropped.append(DroppedBlock(self.address, self.nbytes, self.allocation_event))
