"""Drives an ASGI application without a server: one request, and all messages about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from tests.helpers import quickly

Message = MutableMapping[str, Any]

DISCONNECT: Message = {"type": "http.disconnect"}


def chunk(body: bytes = b"", more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


class Exchange:
    """The server's side of one request. A test feeds messages of the client and looks at what was sent."""

    def __init__(self, *messages: Message, **scope: Any) -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": "/",
            "raw_path": b"/",
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
            **scope,
        }
        self.sent: list[Message] = []
        self.asked = 0  #: calls of `receive`
        self.asking = 0  #: calls of `receive` that wait
        self._messages: asyncio.Queue[Message | BaseException] = asyncio.Queue()
        self.feed(*messages)

    def feed(self, *messages: Message | BaseException) -> None:
        """Let the client send these. An exception is raised by `receive`."""
        for message in messages:
            self._messages.put_nowait(message)

    async def receive(self) -> Message:
        self.asked += 1
        self.asking += 1
        assert self.asking == 1, "`receive` was called twice at one time"
        try:
            message = await self._messages.get()
        finally:
            self.asking -= 1
        if isinstance(message, BaseException):
            raise message
        return message

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def start(self, app: Any) -> asyncio.Task[None]:
        """Run the application on this request."""

        async def run() -> None:
            await app(self.scope, self.receive, self.send)

        return asyncio.create_task(run())

    async def run(self, app: Any) -> Exchange:
        await quickly(self.start(app))
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent if message["type"] == "http.response.body")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def respond(send: Any, status: int = 200, body: bytes = b"done") -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
