"""UnseenFailure: a failure that no code of the program has seen, until the normal end of a block raises it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._base._failure import Poison

__all__ = ["UnseenFailure"]


class UnseenFailure:
    """The failure of a stream, or of the streams of a device that have ended, until code of the program has seen it.

    Parameters
    ----------
    of_device
        That of the stream's device, which gets the failure when the stream ends; None for that of a device.
    """

    __slots__ = ("_of_device", "_poison")

    def __init__(self, of_device: UnseenFailure | None = None) -> None:
        self._of_device = of_device
        self._poison: Poison | None = None

    def note(self, poison: Poison) -> None:
        """Keep a failure for the end of a block, unless an earlier one is unseen."""
        if self._poison is None or not self._poison.is_unseen:
            self._poison = poison

    def forget_seen(self) -> None:
        """Refer to failures that code of the program has seen no longer: their tracebacks hold what it has used."""
        if self._poison is not None and not self._poison.is_unseen:
            self._poison = None
        if self._of_device is not None:
            self._of_device.forget_seen()

    def pass_on(self) -> None:
        """Let the end of the device's block raise the failure, too: the stream has ended."""
        if self._of_device is not None and self._poison is not None and self._poison.is_unseen:
            self._of_device.note(self._poison)

    def take(self) -> Poison | None:
        """Return the failure if no code of the program has seen it, and forget it."""
        poison, self._poison = self._poison, None
        return poison if poison is not None and poison.is_unseen else None

    def raise_it(self) -> None:
        """Raise the failure that no code of the program has seen, if there is one: at the normal end of a block."""
        poison = self.take()
        if poison is not None:
            if self._of_device is not None and self._of_device._poison is poison:
                self._of_device.take()
            poison.deliver()
