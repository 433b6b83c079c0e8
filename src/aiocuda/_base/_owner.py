"""Owner: an object that owns work, and so has a `Scope`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ._types import ProcessLocal

__all__ = ["Outcome", "Owner"]

#: Whether the accepted work has ended. ``"left"``: nothing has waited for it. ``"late"``: the deadline has passed.
#: ``"interrupted"``: Ctrl-C has ended the wait, or the event loop has. ``"failed"``: the drain has raised an exception.
Outcome: TypeAlias = Literal["done", "left", "late", "interrupted", "failed"]


class Owner(ProcessLocal):
    """An object that owns work. Its `Scope` calls these methods, each once, in this order.

    `_refuse` and `_withdraw` are synchronous, so they also serve `Scope.abandon`.
    """

    __slots__ = ()

    def _refuse(self) -> None:
        """Accept no more work, and wake the tasks that wait for a turn inside the object with their `ClosedError`.

        If it raises, the object stays open.
        """
        raise NotImplementedError

    def _withdraw(self) -> None:
        """End the work that is still on the host. Called only if the object is left, by an exception or cancelled."""

    async def _drain(self) -> None:
        """Wait for the accepted work, without a limit of time. Cancelled when the deadline has passed."""

    async def _release(self, outcome: Outcome) -> None:
        """Give everything back: the work has ended; or it has not, and ``outcome`` says why.

        An object that does not drain when it is left gives everything back here without suspending.
        """
        raise NotImplementedError

    def _unfinished(self) -> int | None:
        """Return how much accepted work has not ended; None if that is not known.

        With 0 there is no drain, and `_release` does not suspend.
        """
        return None
