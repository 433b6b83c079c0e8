"""A headless Chromium, driven through its DevTools pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

#: The program, or None if it is not installed.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

#: The program reads commands from descriptor 3, and writes answers to descriptor 4.
LAUNCHER = """
import fcntl, os, sys
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

#: Seconds for an answer.
PATIENCE = 60.0


class Browser:
    """One page. ``errors`` has the exceptions of its scripts and what its policy has refused."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
        launched = (sys.executable, "-c", LAUNCHER, str(command_read), str(answer_write), CHROMIUM)
        self._process = subprocess.Popen(
            [*launched, *options, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._numbers = itertools.count(1)
        self._received = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self._loaded = 0

    def __enter__(self) -> Self:
        targets = self.command("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.command("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait()

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "Chromium has ended"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]))
            case "Log.entryAdded" if answer["params"]["entry"]["level"] == "error":
                self.errors.append(json.dumps(answer["params"]))
            case "Page.loadEventFired":
                self._loaded += 1
        return answer

    def open(self, address: str) -> None:
        """Open an address, and wait until it is loaded and drawn."""
        before = self._loaded
        self.command("Page.navigate", url=address)
        while self._loaded == before:
            self._receive()
        self.drawn()

    def drawn(self) -> None:
        """Wait until the page has drawn two frames more."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        answer = self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.drawn()

    def scheme(self, name: str) -> None:
        """Prefer ``"light"`` or ``"dark"``."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])
        self.drawn()

    def key(self, key: str, text: str = "") -> None:
        more = {"text": text} if text else {}
        self.command("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
