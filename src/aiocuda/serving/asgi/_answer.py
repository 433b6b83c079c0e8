"""Whole responses: a status and a short JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ._types import Send

__all__ = ["answer"]


async def answer(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]] = (), /, **fields: str) -> None:
    """Send a response with ``fields`` as its JSON object."""
    body = json.dumps(fields).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
