"""The servers: ours and its peers, each in a process of its own.

``python -m tests.load.servers NAME --port PORT --core CORE`` serves ``POST /predict`` on 127.0.0.1 until SIGTERM.

================  =====================================================================================================
``ours``          Starlette and `aiocuda.serving.MicroBatcher`; the model is a kernel of the host driver
``ours_one``      the same with one batch at a time
``with_litserve`` LitServe: ``max_batch_size``, ``batch_timeout``, ZeroMQ (``fast_queue``), its queue's ``timeout``
``with_mosec``    mosec: ``max_batch_size``, ``max_wait_time``, its queue's ``capacity``; the front is written in Rust
``with_batched``  FastAPI and `batched.aio.dynamically`
``with_threads``  FastAPI and `asyncio.to_thread`, each request alone
================  =====================================================================================================

All processes of a server run on one core, the client on another one. LitServe and mosec have several processes and gain
nothing from that here: the table compares servers per core. All uvicorn servers have uvloop and httptools, as
``uvicorn[standard]`` installs them, and no access log.
"""

from __future__ import annotations

import dataclasses
import importlib.util

__all__ = ["SERVERS", "Server"]


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A server, described without importing it.

    Attributes
    ----------
    name
        The module in this package.
    label
        The name in tables.
    requires
        The packages that it imports.
    saturated_by
        Requests in flight that saturate it, below the limit that it sets.
    """

    name: str
    label: str
    requires: tuple[str, ...]
    saturated_by: int = 64

    def missing(self) -> str | None:
        """Return the reason why it cannot run here, or None."""
        absent = [package for package in self.requires if importlib.util.find_spec(package) is None]
        return f"{', '.join(absent)} not installed: make bench installs it" if absent else None


SERVERS = {
    server.name: server
    for server in (
        Server("ours", "aiocuda", ("starlette", "uvicorn")),
        Server("ours_one", "aiocuda, one batch at a time", ("starlette", "uvicorn")),
        Server("with_litserve", "LitServe", ("litserve",)),
        Server("with_mosec", "mosec", ("mosec",)),
        Server("with_batched", "batched", ("batched", "fastapi", "uvicorn")),
        Server("with_threads", "to_thread", ("fastapi", "uvicorn"), 4),
    )
}
