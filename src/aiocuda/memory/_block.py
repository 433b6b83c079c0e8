"""Block: one allocation, and who may still be using it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..driver.protocol import Driver
from ..errors import StaleHandleError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from ..completion._device_state import DeviceState
    from ..completion._operation import Operation
    from ..completion._stream_queue import StreamQueue
    from ._accesses import Ranges
    from ._pinned import Region

__all__ = ["MANY_USES", "Block", "DroppedBlock", "Owner"]

#: Queues that a block may have been used by before those that have passed are forgotten: streams come and go, and a
#: buffer may outlive them all.
MANY_USES = 8


class DroppedBlock(NamedTuple):
    """What a finaliser leaves of a block."""

    address: int
    nbytes: int
    allocation_event: Operation[Any] | None


class Owner(Protocol):
    """Where a block goes back to."""

    device_state: DeviceState
    closed: bool

    @property
    def dropped(self) -> list[DroppedBlock] | deque[DroppedBlock]:
        """What finalisers have left, by one append each."""


class _Depending:
    """The blocks that depend on an operation: called when it has passed, in place of what was to be called then."""

    __slots__ = ("_operation", "_release", "blocks")

    def __init__(self, operation: Operation[Any], release: Callable[[], object] | None) -> None:
        self._operation = operation
        self._release = release
        self.blocks: list[Block] = []

    def __call__(self) -> None:
        for block in self.blocks:
            if block.dependencies is not None:
                block.dependencies.pop(self._operation, None)
        if self._release is not None:
            self._release()


class Block:
    """A range of memory that is allocated and freed as a whole; buffers and their slices are views of it.

    ``uses`` has the newest operation of each queue that touches it: freeing waits for all of them, on the device. A
    queue that stands there may use the block again without asking; so those of another device, which only copy from or
    to it, stand in ``peers``.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "allocation_event",
        "assigned",
        "dependencies",
        "device",
        "driver",
        "dtype",
        "freed",
        "home",
        "nbytes",
        "owner",
        "peers",
        "poison",
        "ready",
        "region",
        "shape",
        "uses",
    )  # fmt: skip

    #: What it was made as, for messages.
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None

    def __init__(
        self,
        driver: Driver,
        device: int,
        address: int,
        nbytes: int,
        home: StreamQueue | None,
        owner: Owner,
        shape: tuple[int, ...] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self.driver = driver
        self.device = device  # -1 for host memory that serves every device
        self.address = address
        self.nbytes = nbytes
        self.home = home
        self.owner = owner
        self.shape = shape
        self.dtype = dtype
        self.uses: dict[StreamQueue, Operation[Any]] = {}
        self.peers: dict[StreamQueue, Operation[Any]] | None = None
        #: What the free is to wait for besides: a user has said so.
        self.dependencies: dict[Operation[Any], None] | None = None
        #: Behind the allocation in its stream; another stream's first use waits for it.
        self.allocation_event: Operation[Any] | None = None
        #: Bytes that an operation should have written and did not, by the graph of a coordinator. The block holds them:
        #: errors hold frames, frames hold buffers, and only what belongs to the block ends with it.
        self.poison: dict[Any, Ranges[Any]] = {}
        #: How often its bytes have lost their meaning: see `assign`.
        self.assigned = 0
        #: Host memory that is still being page-locked.
        self.region: Region | None = None
        self.freed = False
        #: A stream that has used it before may do so again without asking: it is not freed, and locked if need be.
        self.ready = True

    def used_by_peer(self, queue: StreamQueue, operation: Operation[Any]) -> None:
        """A queue of another device copies from or to it."""
        if self.peers is None:
            self.peers = {}
        elif len(self.peers) >= MANY_USES:
            self.unfinished()  # forgets what has passed
        self.peers[queue] = operation

    def assign(self) -> None:
        """Give the memory to another use: its bytes mean nothing, as those of a new allocation."""
        self.assigned += 1
        if self.poison:
            self.poison.clear()

    def retire(self) -> None:
        """It is to be freed: nothing new may use it."""
        self.freed = True
        self.ready = False

    def revive(self) -> None:
        """It could not be freed: all is as before."""
        self.freed = False
        self.ready = self.region is None

    def check(self) -> None:
        """Raise if it has been freed, by hand or with its device."""
        if self.freed:
            raise StaleHandleError(
                f"{self} has been freed: make another one, and free this one behind its last use; a free needs no "
                "waiting, for it takes place behind all that was enqueued before it"
            )
        if self.owner.closed:
            raise StaleHandleError(
                f"{self} went with its device, which has been closed: download what is to outlive it"
            )

    def unfinished(self) -> list[Operation[Any]]:
        """What has to pass before anybody else may have the memory; what has passed is forgotten."""
        if self.allocation_event is not None and self.allocation_event.is_settled:
            self.allocation_event = None
        found = [] if self.allocation_event is None else [self.allocation_event]
        if not (self.uses or self.peers or self.dependencies):
            return found
        for uses in (self.uses, self.peers or {}):
            for queue, operation in list(uses.items()):
                if operation.is_settled:
                    uses.pop(queue, None)
                else:
                    found.append(operation)
        if self.dependencies:
            found += [operation for operation in tuple(self.dependencies) if not operation.is_settled]
        return found

    @property
    def in_use(self) -> bool:
        """Does something still use it?"""
        return bool(self.unfinished())

    def depend(self, operation: Operation[Any]) -> None:
        """The memory is not given back before the operation has passed.

        The operation holds the block until then, so that a finaliser comes no sooner, and the block forgets it then, so
        that the operation's result does not live as long as the memory.
        """
        if operation.is_settled or (self.dependencies is not None and operation in self.dependencies):
            return
        if self.dependencies is None:
            self.dependencies = {}
        self.dependencies[operation] = None
        release = operation.on_settled
        if not isinstance(release, _Depending):
            release = operation.on_settled = _Depending(operation, release)
        release.blocks.append(self)

    def __str__(self) -> str:
        made = "" if self.shape is None else f"of shape {self.shape} {self.dtype} "
        return f"the buffer {made}at {self.address:#x} ({self.nbytes} bytes)"

    def __del__(self) -> None:
        # Every operation that used it has passed: each one held it until then. A finaliser runs on any thread, in the
        # middle of anything, so it does this one thing; the owning loop gives the memory back. After a fault nobody
        # does, and what was allocated for an upload would hold the array that was uploaded.
        if not self.freed and self.nbytes and self.driver.fault is None:
            self.owner.dropped.append(DroppedBlock(self.address, self.nbytes, self.allocation_event))
