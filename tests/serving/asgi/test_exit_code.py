"""The exit code of `exit_on_fault` with real servers, whatever threads the service has used."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import quickly, until
from tests.serving.asgi.server import Server, environment, running, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.heavy, pytest.mark.slow]

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
APP = "tests.serving.asgi.service_program:app"
LIMIT = ("--timeout-graceful-shutdown", "600")

#: The worker of the documentation, or uvicorn's own copy of it, which is deprecated.
WORKER = "uvicorn_worker" if importlib.util.find_spec("uvicorn_worker") is not None else "uvicorn.workers"


async def fault(server: Server) -> None:
    assert (await server.get("/fault"))[0] == 503


@LOOPS
@pytest.mark.parametrize("workers", [(), ("--workers", "1")], ids=["server", "one worker"])
async def test_after_a_thread(loop: str, workers: Sequence[str]) -> None:
    async with serving("--loop", loop, *LIMIT, *workers) as server:
        assert await server.get("/thread") == (200, b"thread")
        assert await server.get("/pool") == (200, b"pool")
        await fault(server)
        assert await server.ended() == 70
    assert "closed" in server.lines
    assert "Finished server process" in server.text
    assert "Traceback" not in server.text


@LOOPS
async def test_slow_thread_is_waited_for(loop: str, tmp_path: Path) -> None:
    async with serving("--loop", loop, *LIMIT) as server:
        assert (await server.get(f"/thread_goes_on?until={tmp_path / 'file'}"))[0] == 200
        await fault(server)
        await until(lambda: "closed" in server.lines)
        (tmp_path / "file").touch()
        assert await server.ended() == 70
    assert server.lines.index("closed") < server.lines.index("thread ended")
    assert "Traceback" not in server.text


@LOOPS
async def test_sigterm_while_a_thread_is_waited_for_changes_nothing(loop: str, tmp_path: Path) -> None:
    async with serving("--loop", loop, *LIMIT) as server:
        assert (await server.get(f"/thread_goes_on?until={tmp_path / 'file'}"))[0] == 200
        await fault(server)
        await until(lambda: "loop ends" in server.lines)
        server.terminate()
        (tmp_path / "file").touch()
        assert await server.ended() == 70
    assert "thread ended" in server.lines
    assert "Traceback" not in server.text


@LOOPS
async def test_thread_that_never_ends_does_not_hold_the_process(loop: str) -> None:
    async with serving("--loop", loop, "--timeout-graceful-shutdown", "10") as server:
        assert (await server.get("/thread_goes_on"))[0] == 200
        await fault(server)
        assert await server.ended() == 70
    (line,) = [line for line in server.lines if "process_end_forced" in line]
    assert re.search(r"exit_code=70 seconds=10\.0 threads=.*(asyncio|uvloop)_\d", line), line
    assert "Traceback" not in server.text


@LOOPS
async def test_workers_are_replaced(loop: str, tmp_path: Path) -> None:
    """Each of two workers has used threads; one of them has a slow one when it faults."""
    async with serving("--loop", loop, *LIMIT, "--workers", "2") as server:
        await until(lambda: server.text.count("Application startup complete") == 2)
        client = await server.client()  # of one worker
        assert (await client.get(f"/thread_goes_on?until={tmp_path / 'file'}"))[0] == 200
        assert (await client.get("/fault"))[0] == 503
        await until(lambda: "closed" in server.lines)
        (tmp_path / "file").touch()
        await until(lambda: re.search(r"worker \d+ ended with 70", server.text))
        await until(lambda: server.text.count("Application startup complete") == 3)
        assert "thread ended" in server.lines
        assert {(await server.get("/thread"))[0] for _ in range(10)} == {200}
        server.terminate()
        await server.ended()
    assert "Traceback" not in server.text


async def test_thread_that_holds_the_lock_of_a_log_handler_does_not_hold_the_process() -> None:
    """The thread that ends the process cannot write the event, nor flush the handler."""
    program = (
        "import logging, threading\n"
        "from aiocuda.serving.asgi import _fault_exit\n"
        "handler = logging.StreamHandler()\n"
        "logging.getLogger('aiocuda').addHandler(handler)\n"
        "held = threading.Event()\n"
        "def hold():\n"
        "    handler.acquire()\n"
        "    held.set()\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=hold).start()\n"
        "held.wait()\n"
        "_fault_exit._end_process(70)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=environment())
    try:
        assert await quickly(process.wait()) == 70
    finally:
        if process.returncode is None:
            process.kill()


async def test_gunicorn(tmp_path: Path) -> None:
    command = ("gunicorn", "-k", f"{WORKER}.UvicornWorker", "--bind", "127.0.0.1:0", APP)
    async with running(*command, started="Application startup complete") as server:
        assert (await server.get(f"/thread_goes_on?until={tmp_path / 'file'}"))[0] == 200
        await fault(server)
        await until(lambda: "closed" in server.lines)
        (tmp_path / "file").touch()
        await until(lambda: re.search(r"Worker \(pid:\d+\) exited with code 70", server.text))
        await until(lambda: server.text.count("Application startup complete") == 2)
        assert "thread ended" in server.lines
        assert await server.get("/thread") == (200, b"thread")
        server.terminate()
        assert await server.ended() == 0
    assert server.lines.count("closed") == 2
    assert "Traceback" not in server.text


@LOOPS
async def test_hypercorn_without_workers(loop: str, tmp_path: Path) -> None:
    command = ("hypercorn", "--workers", "0", "-k", loop, "--bind", "127.0.0.1:0", APP)
    async with running(*command, started="Running on") as server:
        assert (await server.get(f"/thread_goes_on?until={tmp_path / 'file'}"))[0] == 200
        await fault(server)
        await until(lambda: "closed" in server.lines)
        (tmp_path / "file").touch()
        assert await server.ended() == 70
    assert server.lines.index("closed") < server.lines.index("thread ended")
    assert "Traceback" not in server.text


async def test_worker_of_hypercorn_goes_on() -> None:
    """It has no handler for SIGTERM."""
    async with running("hypercorn", "--bind", "127.0.0.1:0", APP, started="Running on") as server:
        assert (await server.get("/health"))[0] == 200
        await fault(server)
        assert (await server.get("/health"))[0] == 503
        await until(lambda: "exit_on_fault=70 cannot end the process" in server.text)
        assert "liveness probe" in server.text
        server.terminate()
        assert await server.ended() == 0
    assert "closed" in server.lines
