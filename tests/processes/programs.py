"""Programs of the processes that `test_child.py` starts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

from aiocuda._processes._messages import receive, send
from aiocuda._processes._parent import InheritedFile, Start, end_with_parent, own_end

__all__ = ["echo", "ends_early", "ends_with_children", "fails", "ignores_the_end", "reports"]


def echo(pipe: InheritedFile, other: InheritedFile, setup: Any) -> None:
    """Send the setup as the first message, then each message back on the other socket."""
    end_with_parent()
    with own_end(pipe) as parent, own_end(other) as answers, contextlib.suppress(EOFError):
        with Start(parent) as start:
            start.result = setup
        while True:
            message, rest = receive(parent)
            send(answers, (message, bytes(rest)), [])


def fails(pipe: InheritedFile, setup: Any) -> None:
    with own_end(pipe) as parent:
        with Start(parent):
            raise LookupError(setup)
        send(parent, "not reached", [])


def ends_early(pipe: InheritedFile, setup: int) -> None:
    if setup < 0:
        os.kill(os.getpid(), -setup)
    os._exit(setup)


def ignores_the_end(pipe: InheritedFile, setup: Any) -> None:
    with own_end(pipe) as parent:
        with Start(parent):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)  # noqa: TID251 - it is killed


def ends_with_children(pipe: InheritedFile, setup: float) -> None:
    """Start a program that inherits all descriptors, and a fork; send their ids; then end. They end by themselves."""
    parent = own_end(pipe)
    with Start(parent) as start:
        program = subprocess.Popen(["sleep", str(setup)], close_fds=False)
        fork = os.fork()
        if not fork:
            time.sleep(setup)  # noqa: TID251 - as a daemon does
            os._exit(0)
        start.result = [program.pid, fork]
    receive(parent)
    os._exit(3)


def reports(pipe: InheritedFile, modules: tuple[str, ...]) -> None:
    """Send what this process has: which of the modules, random numbers, environment, folders."""
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    with own_end(pipe) as parent, Start(parent) as start:
        start.result = {
            "modules": [name for name in modules if name in sys.modules],
            "numpy": None if numpy is None else numpy.random(),
            "torch": None if torch is None else torch.default_generator.initial_seed(),
            "random": random.random(),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
            "parent": os.getppid(),
            "threads": len(os.listdir("/proc/self/task")),
        }
