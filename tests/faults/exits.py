"""Processes that end with a thousand operations pending, each in a way of its own.

``python -m tests.faults.exits --driver host --runs 10`` is a server that has imported aiocuda and opened nothing: it
forks a child for each run, sends it the signals that its case wants, and prints one JSON object for each. A child is
a process like any other: it opens a device of its own, and ends as the interpreter ends.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

import aiocuda
from aiocuda import Device, Operation
from aiocuda.testing import Latch
from aiocuda.testing.kernels import SPIN

PENDING, STREAMS = 1000, 8

#: Seconds after which a child hangs, and is killed.
LIMIT = 60.0

#: Seconds that each device has to end in, more than a child has: an end that waits where it must not hangs.
PATIENCE = 600.0

#: Seconds for which the streams are held where the end waits for them, and where it must not.
BRIEF, ENDLESS = 0.2, 600.0

#: The expected end of each case: the exit status and the last line on stderr.
CASES = {
    "return": (0, ""),
    "sys.exit": (7, ""),
    "exception": (1, "ZeroDivisionError: on purpose"),
    "one SIGINT": (-signal.SIGINT, "KeyboardInterrupt"),
    "two SIGINTs": (-signal.SIGINT, "KeyboardInterrupt"),
    "SIGINT at exit": (7, ""),
    "held for longer": (7, ""),
}

#: Seconds that "held for longer" gives the device.
DEADLINE = 0.5

kept: list[Any] = []


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())


async def heard(operation: Operation[Any]) -> None:
    """Wait for it, and take note of what was withdrawn."""
    with contextlib.suppress(aiocuda.ClosedError):
        await operation


async def fill(device: Device) -> tuple[list[Operation[Any]], Latch]:
    """A thousand operations after a held kernel; some still on the host, half of them awaited."""
    streams = [device.stream() for _ in range(STREAMS)]
    spin = aiocuda.Kernel(SPIN.name, source=SPIN.source, host=SPIN.host)
    await device.load(spin)
    latch = Latch(device, seconds=ENDLESS)
    hold = latch.hold(streams[0])
    for stream in streams[1:]:
        stream.wait(hold)
    await latch.held()
    operations: list[Operation[Any]] = []
    for stream in streams:
        buffer = stream.empty(1000)
        operations += [stream.fill(buffer, value) for value in range(PENDING // STREAMS - 35)]
        operations += [stream.launch(spin, 1, 1, 1000) for _ in range(30)]
        operations += [stream.download(buffer) for _ in range(5)]
    tasks = [asyncio.create_task(heard(operation)) for operation in operations[::2]]
    kept.extend((device, streams, latch, operations, tasks))
    await asyncio.sleep(0)
    assert len(operations) == PENDING
    assert not any(operation.done() for operation in operations)
    return operations, latch


def release_soon(latch: Latch) -> None:
    """While the process ends."""
    releasing = threading.Timer(BRIEF, latch.release)
    releasing.daemon = True
    releasing.start()


async def leave(case: str, driver: Any) -> None:
    """Without closing the device: what the exit does is up to it."""
    device = await aiocuda.open_device(driver=driver, max_in_flight=64)
    device.drain_timeout = {"held for longer": DEADLINE}.get(case, PATIENCE)
    _, latch = await fill(device)
    if case not in ("SIGINT at exit", "held for longer"):
        release_soon(latch)
    if case == "SIGINT at exit":
        atexit.register(interrupt_soon)
    say("ready")
    if case == "exception":
        raise ZeroDivisionError("on purpose")
    if case != "return":
        sys.exit(7)


def interrupt_soon() -> None:
    """The last hook that was registered is the first: it comes just before the one that waits."""
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.1)


async def interrupted(case: str, driver: Any) -> None:
    """In the device's block, which an interrupt cancels."""
    told: list[Operation[Any]] = []
    try:
        async with aiocuda.open_device(driver=driver, max_in_flight=64) as device:
            device.drain_timeout = PATIENCE
            operations, latch = await fill(device)
            for operation in operations:
                operation.add_done_callback(told.append)
            say("ready")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                # The second Ctrl-C comes while the end waits. A moment earlier asyncio itself loses wake-ups: an
                # interrupt within
                # `Future.set_result` leaves a task that never resumes.
                asyncio.get_running_loop().call_later(0.05, say, "waiting")
                if case == "one SIGINT":
                    release_soon(latch)
                raise
    finally:
        states = sorted({operation.state for operation in told})
        say(f"left, {len(told)} told {states}, {device.statistics().in_flight} in flight")


def child(case: str, driver: str) -> None:
    """One run, to the end of the interpreter."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT - 2, exit=True)
    asyncio.run(interrupted(case, driver) if case.endswith((" SIGINT", " SIGINTs")) else leave(case, driver))


class Run:
    """A child, as its parent sees it."""

    def __init__(self, case: str, begin: Callable[[], NoReturn]) -> None:
        self.case = case
        self.begun = time.monotonic()
        self.said: list[str] = []
        self._errors: BinaryIO = tempfile.TemporaryFile()
        self._out, out = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(out, 1)
            os.dup2(self._errors.fileno(), 2)
            begin()
        os.close(out)

    def fileno(self) -> int:
        return self._out

    def hear(self) -> bool:
        """Read the child's output and do the next action of its case; False when the output ends."""
        words = os.read(self._out, 65536).decode()
        for line in words.splitlines():
            self.said.append(line)
            if line == "ready" and self.case.endswith((" SIGINT", " SIGINTs")):
                os.kill(self.pid, signal.SIGINT)
            if line == "waiting" and self.case == "two SIGINTs":
                os.kill(self.pid, signal.SIGINT)
        return bool(words)

    def end(self) -> dict[str, Any]:
        """What became of it."""
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self.begun
        os.close(self._out)
        self._errors.seek(0)
        errors = self._errors.read().decode()
        self._errors.close()
        return {
            "case": self.case,
            "status": os.waitstatus_to_exitcode(status),
            "seconds": round(seconds, 3),
            "said": self.said,
            "stderr": errors[:6000],
        }


class InChild(BaseException):
    """Leaves the server's own code in the child, so that nothing of it runs there."""


def serve(cases: list[str], at_once: int) -> None:
    """Run all cases, ``at_once`` at a time."""
    running: list[Run] = []
    waiting = cases[::-1]

    def begin() -> NoReturn:
        raise InChild(running)

    while waiting or running:
        while waiting and len(running) < at_once:
            case = waiting.pop()
            try:
                running.append(Run(case, begin))
            except InChild:
                for run in running:
                    os.close(run.fileno())
                raise InChild(case) from None
        ready, _, _ = select.select(running, [], [], 0.1)
        for run in running.copy():
            if time.monotonic() - run.begun > LIMIT:
                os.kill(run.pid, signal.SIGKILL)
            if run in ready and not run.hear():
                running.remove(run)
                sys.stdout.write(json.dumps(run.end()) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="host")
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    try:
        serve(arguments.cases * arguments.runs, arguments.at_once)
        return
    except InChild as begun:
        case = begun.args[0]
    child(case, arguments.driver)


if __name__ == "__main__":
    main()
