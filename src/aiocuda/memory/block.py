"""Block: one allocation, and who may still be using it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..driver.protocol import Driver
from ..errors import StaleHandleError

if TYPE_CHECKING:
    from ..completion.lane import Lane
    from ..completion.operation import Operation
    from .pinned import Region

__all__ = ["Block", "Left", "Owner"]


class Left(NamedTuple):
    """What a finaliser leaves of a block."""

    address: int
    nbytes: int
    born: Operation[Any] | None


class Owner(Protocol):
    """Where a block goes back to."""

    garbage: deque[Left]
    closed: bool


class Block:
    """A range of memory that is allocated and freed as a whole; buffers and their slices are views of it.

    ``uses`` has the newest operation of each lane that touches it: freeing waits for all of them, on the device.
    """

    __slots__ = ("address", "born", "device", "driver", "freed", "home", "nbytes", "owner", "region", "uses")

    def __init__(self, driver: Driver, device: int, address: int, nbytes: int, home: Lane | None, owner: Owner) -> None:
        self.driver = driver
        self.device = device  # -1 for host memory that serves every device
        self.address = address
        self.nbytes = nbytes
        self.home = home
        self.owner = owner
        self.uses: dict[Lane, Operation[Any]] = {}
        #: Behind the allocation in its stream; another stream's first use waits for it.
        self.born: Operation[Any] | None = None
        #: Host memory that is still being page-locked.
        self.region: Region | None = None
        self.freed = False

    def check(self) -> None:
        """Raise if it has been freed, by hand or with its device."""
        if self.freed:
            raise StaleHandleError(f"the buffer at {self.address:#x} ({self.nbytes} bytes) has been freed")
        if self.owner.closed:
            raise StaleHandleError(
                f"the buffer at {self.address:#x} ({self.nbytes} bytes) went with its device, which has been closed"
            )

    def unfinished(self) -> list[Operation[Any]]:
        """What has to pass before anybody else may have the memory; what has passed is forgotten."""
        if self.born is not None and self.born._passed:
            self.born = None
        for lane, operation in list(self.uses.items()):
            if operation._passed:
                del self.uses[lane]
        return [*self.uses.values()] if self.born is None else [self.born, *self.uses.values()]

    def __del__(self) -> None:
        # Every operation that used it has passed: each one held it until then. A finaliser runs on any thread, in the
        # middle of anything, so it does this one thing; the owning loop gives the memory back.
        if not self.freed and self.nbytes:
            self.owner.garbage.append(Left(self.address, self.nbytes, self.born))
