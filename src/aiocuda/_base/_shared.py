"""What threads share: the lock of counts, and copies of deques that other threads change."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any, Final, TypeVar

from ._checks import has_gil

__all__ = ["COUNTING", "HAS_GIL", "copied"]

T = TypeVar("T")

HAS_GIL: Final = has_gil()

#: Held while a count changes that loops of several threads share. With the GIL, no other thread runs within a ``+=``.
#: It is reentrant, since a finaliser may count, too.
COUNTING: Any = contextlib.nullcontext() if HAS_GIL else threading.RLock()


def copied(items: deque[T]) -> list[T]:
    """Return the items of a deque that another thread may change meanwhile.

    On free-threaded Python, `list` copies lists, dicts and sets at one moment, `tuple` only lists, and nothing a deque.
    """
    while True:
        try:
            return list(items)
        except RuntimeError:  # changed meanwhile
            continue
