"""BlockFields: the attributes of a block of memory, and what each free asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import defaultdict

    import numpy as np

    from ..driver.protocol import Driver
    from ._ring import Ring
    from ._stream_operation import StreamOperation

__all__ = ["BlockFields"]


class BlockFields:
    """The attributes of `aiocuda.memory._block.Block`: each allocation makes one, and each free asks what uses it.

    Attributes
    ----------
    driver, device
        The driver, and the index of the device; -1 for host memory, which all devices can use.
    address, nbytes
        The first byte, and the size.
    shape, dtype
        Of the buffer that the block was allocated for; for error messages.
    home
        The block was allocated in the order of this stream queue; None if no order applies.
    owner
        The memory goes back to it.
    uses
        The newest operation of each queue that uses the block. A free waits, on the device, for all of them. A queue in
        this dictionary may use the block again without a check.
    peers
        The same for queues of other devices, which only copy from or to the block, and for uses by other libraries.
        These always pass the checks again.
    dependencies
        Operations that `DeviceBuffer.add_dependency` has added; a free waits for them, too.
    allocation_event
        An operation after the allocation in its stream. The first use in another stream waits for it.
    poison
        Ranges that a failed operation should have written, by the graph of a coordinator; None before the first one.
        The block holds them: errors hold frames, frames hold buffers, and only the block's own attributes end with it.
    assigned
        How often `assign` was called.
    region
        The host memory of the block while it is being page-locked; else None.
    freed
        True once the block has been freed.
    ready
        True if a queue in ``uses`` may use the block again without a check: it is not freed, and it is page-locked.
    """

    __slots__ = ("__weakref__", "address", "allocation_event", "assigned", "dependencies", "device", "driver", "dtype",
                 "freed", "home", "nbytes", "owner", "peers", "poison", "ready", "region", "shape", "uses")  # fmt: skip

    def __init__(
        self, driver: Driver, device: int, address: int, nbytes: int, home: Ring | None,
        owner: Any, shape: tuple[int, ...] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.home = home
        self.owner = owner
        self.shape = shape
        self.dtype = dtype
        self.uses: dict[Ring, StreamOperation[Any]] = {}
        self.peers: dict[Ring, StreamOperation[Any]] | None = None
        self.dependencies: dict[StreamOperation[Any], None] | None = None
        self.allocation_event: StreamOperation[Any] | None = None
        self.poison: defaultdict[Any, Any] | None = None
        self.assigned = 0
        self.region: Any = None
        self.freed = False
        self.ready = True

    def retire(self) -> None:
        """Mark the block as freed: no new operation may use it."""
        self.freed = True
        self.ready = False

    def revive(self) -> None:
        """Undo `retire`: the memory could not be freed."""
        self.freed = False
        self.ready = self.region is None

    def unfinished(self) -> list[StreamOperation[Any]]:
        """Return the operations that must pass before the memory is used again. Entries that have passed are removed.

        Uses by other libraries (`ExternalUse`) are among them.
        """
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
