"""Processes that a process starts: start, first message, end."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import numpy as np
import pytest

from aiocuda._processes._child import Child
from aiocuda._processes._failures import Failure
from aiocuda._processes._fork_server import server_of
from aiocuda._processes._imports import Order
from aiocuda._processes._messages import Buffer
from aiocuda.errors import ClosedError
from tests.helpers import until
from tests.processes import programs

pytestmark = pytest.mark.slow


#: The server of these tests imports no packages.
ORDER = Order(tuple(sys.path), (), ())


@pytest.fixture(params=["spawn", "forkserver"])
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def child(main: Any, setup: Any, method: str = "spawn", pairs: int = 1) -> Child:
    server = server_of(ORDER) if method == "forkserver" else None
    return Child(main, setup, name="test", use="run a test", server=server, pairs=pairs, daemon=True)


@pytest.fixture
def no_file_is_left() -> Iterator[None]:
    """The end of a process closes all its descriptors here."""
    started = child(programs.ends_early, 0, "forkserver")  # starts what stays: the fork server and the tracker
    started.start()
    started.end()
    before = len(os.listdir("/dev/fd"))
    yield
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_file_is_left")
async def test_messages_of_several_sockets(method: str) -> None:
    process = child(programs.echo, {"answer": 42}, method, pairs=2)
    process.start()
    assert process.first_message() == {"answer": 42}
    received: list[Any] = []
    lost: list[None] = []
    process.connect(lambda value, rest: received.append(value), lambda: lost.append(None))
    process.sockets[0].send("small")
    array: Any = np.arange(1_000_000)
    process.sockets[0].send("large", [Buffer(array)])
    await until(lambda: len(received) == 2)
    assert received == [("small", b""), ("large", array.tobytes())]
    assert process.exit_code is None
    assert process.runs
    process.dismiss()
    assert process.end() == 0
    assert not process.runs
    assert not lost


@pytest.mark.asyncio
async def test_end_of_the_process_is_noticed_once_for_each_socket(method: str) -> None:
    process = child(programs.echo, None, method, pairs=2)
    process.start()
    process.first_message()
    lost: list[None] = []
    process.connect(lambda value, rest: None, lambda: lost.append(None))
    process.kill()
    await until(lambda: len(lost) == 2)
    assert process.end() == -signal.SIGKILL
    assert process.ending == "has ended with exit code -9 (SIGKILL)"


@pytest.mark.usefixtures("no_file_is_left")
def test_a_start_that_fails_is_the_first_message(method: str) -> None:
    process = child(programs.fails, "key", method)
    process.start()
    failure = process.first_message()
    assert isinstance(failure, Failure)
    error = failure.load()
    assert isinstance(error, LookupError)
    assert error.args == ("key",)
    assert "in fails" in failure.trace
    assert process.end() == 0


@pytest.mark.parametrize(("code", "text"), [(7, "7"), (-9, "-9 (SIGKILL)"), (-40, "-40")])
@pytest.mark.usefixtures("no_file_is_left")
def test_a_process_that_ends_before_its_first_message(method: str, code: int, text: str) -> None:
    process = child(programs.ends_early, code, method)
    process.start()
    with pytest.raises(EOFError):
        process.first_message()
    assert process.end() == code
    assert process.early_end.startswith(f"has ended with exit code {text} before it was ready: ")
    assert "must not run a test by itself" in process.early_end


@pytest.mark.usefixtures("no_file_is_left")
def test_a_process_that_does_not_end_by_itself_is_killed(method: str) -> None:
    process = child(programs.ignores_the_end, None, method)
    process.start()
    process.first_message()
    assert process.end(time.monotonic() + 0.2) == -signal.SIGKILL
    assert process.end() == -signal.SIGKILL


@pytest.mark.parametrize("how", ["kill", "end"])
@pytest.mark.usefixtures("no_file_is_left")
def test_a_process_that_was_ended_is_not_started(how: str) -> None:
    process = child(programs.fails, None)
    assert getattr(process, how)() is None
    with pytest.raises(ClosedError, match="test was ended before it was started"):
        process.start()
    process.end()
    assert process.pid is None
    assert not process.runs


def test_processes_that_a_process_has_started_do_not_hide_its_end(method: str) -> None:
    async def main() -> None:
        process = child(programs.ends_with_children, 600.0, method)
        process.start()
        children = process.first_message()
        lost: list[None] = []
        process.connect(lambda value, rest: None, lambda: lost.append(None))
        process.sockets[0].send("end")
        await until(lambda: lost)
        await until(lambda: not process.runs)
        assert process.end() == 3
        for each in children:
            os.kill(each, signal.SIGKILL)  # it was still running

    asyncio.run(main())


def test_the_default_timeout_of_sockets_has_no_effect(method: str) -> None:
    socket.setdefaulttimeout(0.0)
    try:
        process = child(programs.echo, 1, method, pairs=2)
        process.start()
        assert process.first_message() == 1
        assert process.end() == 0
    finally:
        socket.setdefaulttimeout(None)


def test_a_process_that_other_code_has_waited_for_has_no_exit_code() -> None:
    process = child(programs.ends_early, 7)
    process.start()
    assert process.pid is not None
    os.waitpid(process.pid, 0)
    assert not process.runs
    assert process.exit_code is None
    assert process.ending == "has ended"
    process.kill()  # another process may have its id
    process.end()


def test_exit_code_is_that_of_the_process_while_another_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Process.start` asks for the exit codes of all processes: the fork server sends each of them once."""
    first, second = child(programs.ends_early, 7, "forkserver"), child(programs.ends_early, 0, "forkserver")
    first.start()
    read, started = forkserver.read_signed, threading.Event()

    def read_late(descriptor: int) -> int:
        if threading.current_thread() is threading.main_thread():
            started.wait(0.3)  # another thread asks in between, if it can
        code: int = read(descriptor)
        return code

    def start() -> None:
        second.start()
        started.set()

    monkeypatch.setattr(forkserver, "read_signed", read_late)
    multiprocessing.connection.wait([first._process.sentinel])
    thread = threading.Thread(target=start)
    asked = threading.Timer(0.05, thread.start)
    asked.start()
    assert first.end() == 7
    asked.join()
    thread.join()
    assert second.end() == 0
