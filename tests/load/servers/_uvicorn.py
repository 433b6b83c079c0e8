"""Runs an ASGI application by uvicorn, in the same way for each server that has one."""

from __future__ import annotations

import gc
from typing import Any

import uvicorn

__all__ = ["run"]


def run(app: Any, port: int) -> None:
    """Serve the application on 127.0.0.1 until SIGTERM, with uvicorn's fastest loop and parser that are installed."""
    gc.collect()
    gc.freeze()  # the objects of the start-up are not traversed by later collections, in any server
    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="warning", access_log=False, timeout_keep_alive=60, backlog=2048
    )
