"""`RunningServer`: a server in processes of its own, on a core of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from typing import Self

from tests.benchmarks.machine import ROOT

from .client import Client
from .servers import Server
from .setting import Setting, is_right, request

__all__ = ["RunningServer", "ServerError"]

_START_S, _STOP_S = 60.0, 10.0


class ServerError(Exception):
    """A server did not start, or did not end. The message has the end of its output."""


class RunningServer:
    """A server that has answered a request. It runs until the end of the ``async with``.

    Parameters
    ----------
    server
        The server.
    setting
        Its times.
    core
        The processor core for all its processes; None: any.
    python
        The interpreter; None: this one.

    Attributes
    ----------
    port
        Its port on 127.0.0.1.
    """

    def __init__(self, server: Server, setting: Setting, *, core: int | None = None, python: str | None = None) -> None:
        self.port = _free_port()
        self._server = server
        self._command = [python or sys.executable, "-m", "tests.load.servers", server.name, "--port", str(self.port)]
        self._command += ["--scale", str(setting.scale)]
        self._command += [] if core is None else ["--core", str(core)]
        self._output = tempfile.TemporaryFile()  # closed at the end of the `async with`
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._output,
            stderr=asyncio.subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # a process group: LitServe and mosec have further processes
        )
        try:
            await self._answers()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stop()

    def output(self) -> str:
        """Return the end of the server's output."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 4000))
        return self._output.read().decode(errors="replace")

    async def _answers(self) -> None:
        """Wait until a request is answered."""
        end = time.monotonic() + _START_S
        problem = ""
        while time.monotonic() < end:
            if self._process is not None and self._process.returncode is not None:
                raise ServerError(f"{self._server.label} ended with {self._process.returncode}: {self.output()}")
            async with Client(self.port, request, is_right) as client:
                (outcome,) = await client.open_loop([0.0], drain_s=2.0)
            if outcome.is_accepted:
                return
            problem = outcome.problem or f"status {outcome.status}"
            await asyncio.sleep(0.1)
        raise ServerError(f"{self._server.label} has not answered in {_START_S} s, {problem}: {self.output()}")

    async def _stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            if process.returncode is None:
                process.terminate()
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
        except TimeoutError as late:
            text = f"{self._server.label} has not ended {_STOP_S} s after SIGTERM: {self.output()}"
            raise ServerError(text) from late
        finally:
            _kill_group(process.pid)
            self._output.close()


def _kill_group(leader: int) -> None:
    """End what is left of the processes that the server has started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # there is none


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
