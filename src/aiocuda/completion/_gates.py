"""Gates: conditions on the host that an operation waits for before its stream gets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .._core import DONE, FAILED, LANDING, QUEUED, STAGING, SUBMITTED

if TYPE_CHECKING:
    from .._base._failure import Failure
    from .._core import Ring, StreamOperation

__all__ = ["Every", "Gate", "Submitted"]


class Gate(Protocol):
    """A condition on the host that an operation waits for."""

    def ready(self, operation: StreamOperation[Any]) -> bool:
        """Return whether the operation may be submitted now. Each `HostQueue.pump` asks. May raise its failure."""

    def failure(self) -> Failure | None:
        """Return a failure elsewhere that skips the operation. Asked once, when ready."""


class Submitted:
    """A gate that opens when an operation of another stream was submitted, so that it has an event to wait for."""

    __slots__ = ("_follower", "_known", "_operation")

    def __init__(self, operation: StreamOperation[Any], follower: Ring) -> None:
        self._operation = operation
        self._follower = follower
        failure = operation.failure
        # A wait for an operation with a known failure is intended. A failure that is delivered later still
        # skips the operations that depend on it.
        self._known = failure is not None and failure.delivered

    def ready(self, operation: StreamOperation[Any]) -> bool:
        queue = self._operation.queue
        state = self._operation.status
        if state in (SUBMITTED, LANDING, DONE, FAILED):
            return True
        # A queued operation is in the host queue. An abandoned operation may be.
        if state in (QUEUED, STAGING) or any(entry is self._operation for entry in queue.on_host):
            queue.rare.host_queue.followers[self._follower] = None
            return False
        return True

    def failure(self) -> Failure | None:
        return None if self._known else self._operation.failure


class Every:
    """A gate that opens when all of several gates are open."""

    __slots__ = ("_gates",)

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates

    def ready(self, operation: StreamOperation[Any]) -> bool:
        return all(gate.ready(operation) for gate in self._gates)

    def failure(self) -> Failure | None:
        return next(filter(None, (gate.failure() for gate in self._gates)), None)
