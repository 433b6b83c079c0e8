"""A server in a process of its own, and clients on raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.helpers import PATIENCE, quickly, until
from tests.project.tree import ROOT, SOURCE

#: In a line of uvicorn, gunicorn or hypercorn.
_PORT = re.compile(r"(?:[Rr]unning on|Listening at:) http://127\.0\.0\.1:(\d+)")


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, path: str, *, body: bytes = b"", chunked: bool = False, method: str = "GET") -> None:
        """Send a request."""
        head = f"{method} {path} HTTP/1.1\r\nhost: test\r\n"
        if chunked:
            head += "transfer-encoding: chunked\r\n"
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body, b""))
        elif body:
            head += f"content-length: {len(body)}\r\n"
        self.writer.write(head.encode() + b"\r\n" + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers of one response."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        headers = dict(line.split(": ", 1) for line in lines if line)
        assert "content-length" in headers, headers
        return int(first.split()[1]), headers

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body of one response."""
        status, headers = await self.head()
        return status, await self.reader.readexactly(int(headers["content-length"]))

    async def get(self, path: str, **options: Any) -> tuple[int, bytes]:
        self.send(path, **options)
        return await quickly(self.answer())  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Disconnect."""
        self.writer.close()

    def abort(self) -> None:
        """Disconnect by a reset."""
        self.writer.transport.abort()


class Server:
    """A process of a server."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.port = 0
        self._clients: list[Client] = []
        self._listens = False
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())
            found = _PORT.search(self.lines[-1])
            if found is not None:
                self.port = int(found[1])

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Return the exit code."""
        await quickly(self.process.wait())
        await quickly(self._reading)
        assert self.process.returncode is not None
        return self.process.returncode

    async def client(self) -> Client:
        client = Client(*await self._connect())
        self._clients.append(client)
        return client

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection. The first one waits: uvicorn listens a moment after its application has started."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                connection = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionRefusedError:
                if self._listens or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.01)
            else:
                self._listens = True
                return connection

    async def get(self, path: str, **options: Any) -> tuple[int, bytes]:
        client = await self.client()
        try:
            return await client.get(path, **options)
        finally:
            client.leave()
            self._clients.remove(client)

    async def aclose(self) -> None:
        """Kill the process and its workers if they still run, and close the connections."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await self._reading
        for client in self._clients:
            client.abort()
            with contextlib.suppress(OSError):
                await client.writer.wait_closed()

    async def counts(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads((await self.get("/count"))[1])
        return counts

    async def until(self, **expected: int) -> dict[str, int]:
        """Wait until the service has counted these."""
        deadline = time.monotonic() + PATIENCE
        while not expected.items() <= (counts := await self.counts()).items():
            assert time.monotonic() < deadline, f"{counts} did not become {expected} within {PATIENCE} s"
            await asyncio.sleep(0.01)
        return counts


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the library and the tests."""
    return {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}"}


@contextlib.asynccontextmanager
async def serving(*options: str, app: str = "service_program:app") -> AsyncIterator[Server]:
    """Run a service of this folder by uvicorn until the end of the block."""
    command = ("tests.serving.asgi.run_uvicorn", app, "--port", "0", *options)
    async with running(*command, started="Application startup complete") as server:
        yield server


@contextlib.asynccontextmanager
async def running(*command: str, started: str) -> AsyncIterator[Server]:
    """Run a server's module until the end of the block. It has ``started`` when it has written this."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", *command),
        cwd=ROOT,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    server = Server(process)
    try:
        await until(
            lambda: (server.port and started in server.text) or process.returncode is not None,
            "the start of the server",
        )
        assert process.returncode is None, server.text
        yield server
    finally:
        await server.aclose()
