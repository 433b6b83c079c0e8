"""Engine: starts the processes of replicas, and carries messages to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias

from ._messages import Packet, Pickler

__all__ = ["VISIBLE", "Engine", "LostListener", "unanswered"]

#: The variable by which CUDA hides GPUs from a process. An engine sets it for each replica.
VISIBLE = "CUDA_VISIBLE_DEVICES"

#: Called with a replica's index, its epoch and the reason.
LostListener: TypeAlias = Callable[[int, int, str], object]


class Engine(Protocol):
    """Starts the processes of replicas, and carries messages to them. All methods are called on one loop.

    An engine has no policy: the cluster decides when a replica is lost, and when it is started again. It may deliver a
    request twice, and a reply late; the replica and the cluster ignore what is not of the present epoch.

    Attributes
    ----------
    dumps
        Pickles arguments and classes, so that the processes of this engine can load them.
    """

    dumps: Pickler

    async def start(self, replicas: int, lost: LostListener) -> None:
        """Find the machines and GPUs of the replicas. No process is started yet.

        ``lost`` is called when the process of a replica has ended by itself.
        """

    async def spawn(self, replica: int, epoch: int) -> None:
        """Start a process for a replica. No other process of this replica runs."""

    def call(self, replica: int, request: Packet) -> asyncio.Future[Packet]:
        """Send a request to a replica, and return the future of its reply.

        After the loss of the replica, the future fails with an `OSError` or never ends. Cancelling it discards the
        reply; the replica is not told.
        """

    def broadcast(self, request: Packet) -> list[asyncio.Future[Packet]]:
        """Send a request to all replicas that have a process."""

    async def close(self, replica: int | None = None) -> None:
        """Kill the process of one replica, and wait until it has ended; without an argument, of all, and end."""


def unanswered(reason: str) -> asyncio.Future[Packet]:
    """Return the future of a reply that never comes. Its error is a `ConnectionResetError`."""
    reply: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
    reply.set_exception(ConnectionResetError(reason))
    return reply
