"""Unclosed: the warning about an object that was left open."""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = ["Unclosed"]


class Unclosed:
    """Warns when it is collected, unless it was dismissed. An object that must be closed has one.

    Parameters
    ----------
    what, use, opened_at
        For the warning: the object; how it is closed, such as ``async with open_device()``; the line that made it.
    is_over
        Returns True if there is nothing to close, such as after the end of the device. It does not refer to the object.
    """

    __slots__ = ("_is_over", "_text")

    def __init__(self, what: str, use: str, opened_at: object, is_over: Callable[[], bool]) -> None:
        self._text = what, opened_at, use
        self._is_over: Callable[[], bool] | None = is_over

    def dismiss(self) -> None:
        """Warn no more: the end has begun."""
        self._is_over = None

    def __del__(self) -> None:
        if self._is_over is not None and not self._is_over():
            what, opened_at, use = self._text
            message = f"unclosed {what}, opened at {opened_at}: use {use}"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
