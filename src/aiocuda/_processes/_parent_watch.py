"""`end_with_parent`: a thread that ends this process when its parent has ended."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, parent_process

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent has ended."""
    threading.Thread(target=_wait, name="aiocuda-parent-watch", daemon=True).start()


def _wait() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # code of the program may be running, and nothing waits for it
