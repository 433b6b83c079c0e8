"""Ctrl-C: 130 instead of the rest of the work, the terminal as it was, no traceback."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import STRICT, environment
from tests.helpers import PATIENCE

pytest.importorskip("typer")
pytest.importorskip("rich")
termios = pytest.importorskip("termios")
pty = pytest.importorskip("pty")

pytestmark = pytest.mark.slow

HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"


class OnTerminal:
    """The demo on a terminal of its own, and what it has shown so far."""

    def __init__(self, *arguments: str) -> None:
        self._master, self._terminal = pty.openpty()
        self._before = termios.tcgetattr(self._terminal)
        self.shown = b""
        self.process = subprocess.Popen(
            [sys.executable, *STRICT, "-m", "aiocuda", "demo", "--driver", "host", *arguments],
            env=environment(TERM="xterm-256color"),
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            start_new_session=True,
        )

    def read_until(self, words: bytes) -> None:
        deadline = time.monotonic() + PATIENCE
        while words not in self.shown:
            assert self._more(deadline), self.shown

    def end(self) -> int:
        """Its exit code, once all that it shows has been read."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown
            self._more(deadline, 0.05)
        while self._more(time.monotonic() + 0.1):
            pass
        return self.process.returncode

    def _more(self, deadline: float, patience: float = PATIENCE) -> bool:
        wait = max(0.0, min(deadline - time.monotonic(), patience))
        ready, _, _ = select.select([self._master], [], [], wait)
        if ready:
            self.shown += os.read(self._master, 65536)
        return bool(ready)

    @property
    def restored(self) -> bool:
        """Is the terminal as it was?"""
        return bool(termios.tcgetattr(self._terminal) == self._before) and (
            self.shown.rfind(SHOWN) >= self.shown.rfind(HIDDEN)
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._terminal)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[OnTerminal]:
    """On files that keep it busy: for a second while it checks, and for six while it measures."""
    first = tmp_path / "0"
    first.write_bytes(os.urandom(1 << 20) * 2)
    for number in range(1, 200):
        os.link(first, tmp_path / f"{number}")
    running = OnTerminal(str(tmp_path))
    yield running
    running.close()


@pytest.mark.parametrize(("phase", "next_phase"), [(b"checking", b"timing"), (b"timing", b"drawing")])
def test_ctrl_c_at_work(demo: OnTerminal, phase: bytes, next_phase: bytes) -> None:
    demo.read_until(phase)
    assert HIDDEN in demo.shown
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130
    assert next_phase not in demo.shown
    assert demo.restored
    assert b"Traceback" not in demo.shown
    assert b"interrupted" in demo.shown


def test_the_terminal_is_restored(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    running = OnTerminal(str(tmp_path))
    try:
        assert running.end() == 0
        assert running.restored
        assert b"every histogram agrees" in running.shown
    finally:
        running.close()


def test_ctrl_c_twice(demo: OnTerminal) -> None:
    """Impatience changes nothing."""
    demo.read_until(b"checking")
    for _ in range(2):
        demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130
    assert demo.restored
    assert b"Traceback" not in demo.shown
