"""`Connection`: one HTTP/1.1 connection that is kept alive, as an asyncio protocol.

A protocol instead of `asyncio.StreamReader`: streams need a task for each connection and two wake-ups for each
response. The client has one core, and its lateness must not be taken for the latency of a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, cast

__all__ = ["Connection", "Response", "post"]

_MOST_HEAD = 16_384  # bytes of a response's head


class Response(NamedTuple):
    """A response, or the reason why there is none."""

    status: int  #: 0: there is none
    retry_after: float | None = None  #: the header, in seconds
    body: bytes = b""
    problem: str = ""  #: the reason


def post(path: str, body: bytes) -> bytes:
    """Return a request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


class Connection(asyncio.Protocol):
    """Sends one request at a time. Each request has exactly one response.

    Parameters
    ----------
    receive
        Called with the connection and the response to the request under way. When the connection ends, it is called
        with a response of status 0 if a request was under way.
    lost
        Called when the connection has ended, after ``receive``.
    """

    def __init__(self, receive: Callable[[Connection, Response], None], lost: Callable[[Connection], None]) -> None:
        self._receive = receive
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._is_waiting = False
        self._closes = False  # the server has announced that it closes the connection

    @property
    def is_usable(self) -> bool:
        """True if a request can be sent."""
        return not (self._transport is None or self._transport.is_closing() or self._closes or self._is_waiting)

    def request(self, payload: bytes) -> None:
        """Send a request. The connection must be usable."""
        if self._transport is None or not self.is_usable:
            raise RuntimeError("the connection is closed, or a request is under way: use another connection")
        self._is_waiting = True
        self._transport.write(payload)

    def abort(self) -> None:
        """Close the connection without waiting for a response."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            if len(head) > _MOST_HEAD:
                self._fail(f"a head of more than {_MOST_HEAD} bytes")
            return
        fields = _fields(head)
        length = fields.get(b"content-length", b"")
        if not length.isdigit():
            self._fail("a response without Content-Length")
        elif len(rest) >= int(length):
            self._buffer = rest[int(length) :]
            self._closes = fields.get(b"connection", b"").lower() == b"close"
            self._answer(Response(_status(head), _number(fields.get(b"retry-after")), rest[: int(length)]))

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_waiting:
            self._answer(Response(0, problem="disconnected"))
        self._lost(self)

    def _answer(self, response: Response) -> None:
        if not self._is_waiting:
            self._fail("a response without a request")
            return
        self._is_waiting = False
        self._receive(self, response)

    def _fail(self, problem: str) -> None:
        """End the connection after bytes that are no response that this client understands."""
        if self._is_waiting:
            self._is_waiting = False
            self._closes = True
            self._receive(self, Response(0, problem=problem))
        self.abort()


def _status(head: bytes) -> int:
    """Return the status of a response, 0 if its first line is none of HTTP."""
    parts = head.partition(b"\r\n")[0].split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[0].startswith(b"HTTP/1.") and parts[1].isdigit() else 0


def _fields(head: bytes) -> dict[bytes, bytes]:
    """Return the header fields, their names in lower case."""
    fields = {}
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        fields[name.lower()] = value.strip()
    return fields


def _number(value: bytes | None) -> float | None:
    """Return a number of seconds. A date, which the standard allows too, is None."""
    return float(value) if value is not None and value.isdigit() else None
