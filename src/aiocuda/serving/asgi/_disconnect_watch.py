"""DisconnectWatch: looks for the disconnect of one request's client, and cancels the task of its handler."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Self

from ._types import Message, Receive, Scope, Send

__all__ = ["WATCHED", "DisconnectWatch", "may_have_body"]

#: A key of a request's scope: a middleware outside of this one watches the client already.
WATCHED: Final = "aiocuda.disconnect_is_watched"

_DISCONNECT: Final = "http.disconnect"


def may_have_body(scope: Scope) -> bool:
    """Return False if the headers show that the request has no body.

    A body in HTTP/1 has one of two headers. One in HTTP/2 may have neither; only GET and HEAD then have none.
    """
    headers = {name.lower(): value for name, value in scope["headers"]}
    if b"transfer-encoding" in headers:
        return True
    if b"content-length" in headers:
        return bool(headers[b"content-length"].strip(b" 0"))
    return not scope.get("http_version", "1.1").startswith("1") and scope["method"] not in ("GET", "HEAD")


class DisconnectWatch:
    """The `receive` and `send` of one request, and a block around its handler.

    The handler runs in the task that enters the block, which is the task of the server: context variables that it sets
    are visible to the code around the middleware, as without it, and a cancellation of the server reaches it directly.
    A task of its own would cost a copy of the context, and one more task for each request. The other side is that the
    block has to distinguish its own cancellation from others. It counts them as `asyncio.timeout` does.

    A body must stay with the server until the handler reads it: the server stops reading from the client while the body
    is not taken, and sends ``100 Continue`` when it is asked for the body. So the watch asks for messages itself only
    after the last chunk of the body, when only the disconnect can follow. It keeps the message that it has read, and
    gives it to the handler if that asks.

    Attributes
    ----------
    disconnected : bool
        The client has left, and the handler was cancelled.
    hidden : str or None
        Why the watch cannot see the disconnect: what ``receive`` did after the last chunk.
    """

    def __init__(
        self, receive: Receive, send: Send | None, *, body_received: bool, last_chunk_read: bool = False
    ) -> None:
        self.disconnected = False
        self.hidden: str | None = None
        self._receive = receive
        self._send = send
        self._begins_ahead = body_received
        self._body_received = last_chunk_read  # a request without a body has a last chunk, too
        self._kept: deque[Message] = deque()
        self._error: BaseException | None = None  # of `receive`, for the next message
        self._look: asyncio.Task[None] | None = None
        self._over = False  # the last chunk of the response was sent, or the handler has ended
        self._has_trailers = False
        self._task: asyncio.Task[object] | None = None
        self._cancellations = 0

    @classmethod
    def after_body(cls, receive: Receive) -> Self:
        """Return a watch for a handler that begins after the last chunk was read, and does not send by itself."""
        return cls(receive, None, body_received=True, last_chunk_read=True)

    # -- the block -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None  # a coroutine of asyncio runs in a task
        self._cancellations = self._task.cancelling()
        if self._begins_ahead:
            self._look_ahead()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> bool:
        self._over = True
        ours = False
        if self.disconnected:
            assert self._task is not None
            # Another cancellation, of the server, goes on. So does an exception that the handler raised instead.
            ours = self._task.uncancel() <= self._cancellations and kind is asyncio.CancelledError
        look = self._look
        if look is not None and not look.done():
            look.cancel()
            await asyncio.wait({look})
        return ours

    # -- messages ------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """Return the next message of the client: one that the watch has read, or one from the server."""
        while not self._kept:
            if self._look is not None and not self._look.done():
                await asyncio.wait({self._look})  # not awaited itself: a cancellation would end the look
            elif self._error is not None:
                raise self._error
            elif self.disconnected:
                return {"type": _DISCONNECT}
            else:
                message = await self._receive()
                if _is_last_chunk(message):
                    self._body_received = True
                    self._look_ahead()
                return message
        return self._kept.popleft()

    async def send(self, message: Message) -> None:
        """Send a message, unless the client has left. After the last one the handler is not cancelled any more."""
        assert self._send is not None
        if self.disconnected:
            return
        if self._ends_response(message):
            # Before it is sent: then a server may report a disconnect although the client is there.
            self._over = True
        await self._send(message)

    def _ends_response(self, message: Message) -> bool:
        kind = message["type"]
        if kind == "http.response.start":
            self._has_trailers = bool(message.get("trailers"))
        if kind == "http.response.trailers":
            return not message.get("more_trailers", False)
        if self._has_trailers:
            return False
        if kind in ("http.response.body", "http.response.zerocopysend"):
            return not message.get("more_body", False)
        return bool(kind == "http.response.pathsend")

    # -- looking ahead -------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Ask for the next message, unless the handler cannot be cancelled any more."""
        if not self._over:
            self._look = asyncio.create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        """Read one message. When this task is done, the message is kept, or the error."""
        try:
            message = await self._receive()
        except Exception as error:  # noqa: BLE001 - the handler gets it if it asks for a message
            self._error = error
            if not self._over:
                self.hidden = f"raised {error!r}"
            return
        self._kept.append(message)
        if self._over:
            return
        if message["type"] == _DISCONNECT:
            self._client_left()
        elif self._body_received:
            self.hidden = f"returned {message['type']!r}"
        elif _is_last_chunk(message):  # of a request without a body
            self._body_received = True
            self._look_ahead()

    def _client_left(self) -> None:
        assert self._task is not None
        self.disconnected = True
        self._task.cancel("the client has disconnected")


def _is_last_chunk(message: Message) -> bool:
    return bool(message["type"] == "http.request" and not message.get("more_body", False))
