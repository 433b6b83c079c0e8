"""The stacks of other threads, also of threads that go on meanwhile."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading

import pytest

from aiocuda._base._stacks import formatted, stack_of
from tests.helpers import PATIENCE
from tests.project.tree import ROOT

#: A collection begins at another allocation in each round, and the sampled thread then leaves its frames.
PROGRAM = f"""
import gc, threading
from aiocuda._base._stacks import stack_of

class Sampled(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.deep, self.leave, self.left, self.end = (threading.Event() for _ in range(4))

    def run(self):
        self.go_down(20)
        for count in range(100):
            self.go_on(count)
        self.left.set()
        self.end.wait({PATIENCE})

    def go_down(self, depth):
        if depth:
            return self.go_down(depth - 1)
        self.deep.set()
        self.leave.wait({PATIENCE})

    def go_on(self, count):
        return list(map(str, range(count)))

def on_collection(phase, facts):
    sampled.leave.set()
    sampled.left.wait({PATIENCE})

gc.disable()
for threshold in range(1, 60):
    sampled = Sampled()
    sampled.start()
    sampled.deep.wait({PATIENCE})
    gc.collect()
    gc.callbacks.append(on_collection)
    gc.set_threshold(threshold)
    gc.enable()
    stack = stack_of(sampled.ident)
    assert gc.isenabled()
    gc.disable()
    gc.callbacks.remove(on_collection)
    sampled.leave.set()
    sampled.left.wait({PATIENCE})
    names = [frame.f_code.co_name for frame in stack]
    assert names[-3:] == ["run", "_bootstrap_inner", "_bootstrap"], names
    sampled.end.set()
    sampled.join()
print("each stack is whole")
"""


def test_stack_is_whole_though_a_collection_lets_its_thread_go_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "each stack is whole\n"), ended.stderr


def test_collections_stay_disabled() -> None:
    assert gc.isenabled()
    gc.disable()
    try:
        assert stack_of(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_stack_of_a_thread_that_has_ended_is_empty() -> None:
    thread = threading.Thread(target=threading.get_ident)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert stack_of(thread.ident) == []


def test_stack_is_shown_as_in_a_traceback() -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait_inside() -> None:
        inside.set()
        leave.wait(PATIENCE)

    thread = threading.Thread(target=wait_inside)
    thread.start()
    try:
        inside.wait(PATIENCE)
        stack = stack_of(thread.ident or 0)
        shown = formatted(stack)
    finally:
        leave.set()
        thread.join()
    names = [frame.f_code.co_name for frame in stack]
    assert names[-4:] == ["wait_inside", "run", "_bootstrap_inner", "_bootstrap"]
    assert re.findall(r"in (\w+)$", shown, re.MULTILINE) == names[::-1]


def test_no_frame_of_another_thread_is_read_without_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread would leave the frames that are being read. There the process crashed."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert stack_of(threading.get_ident()) == []
