"""InheritedFile: a file descriptor that a process inherits when it is started."""

from __future__ import annotations

import sys
from multiprocessing import reduction
from typing import Any

__all__ = ["InheritedFile"]


class InheritedFile:
    """A file descriptor that a process inherits when it is started. In the process, ``fd`` is its own descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        if sys.platform == "win32":  # there, a descriptor is not inherited
            raise NotImplementedError
        return _inherited, (reduction.DupFd(self.fd),)


def _inherited(duplicate: Any) -> InheritedFile:
    return InheritedFile(duplicate.detach())
