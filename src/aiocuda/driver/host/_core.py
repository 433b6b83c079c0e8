"""Threads as engines: who moves the machine, and who waits for it.

Who moves the machine
    Whoever changes it, under the lock: a caller that enqueues, or a runner whose command has ended. Commands without
    time are carried out then and there. Commands with time go to an idle runner, and one of them stays with the
    runner that made it possible: a chain of kernels in one stream runs on one thread, with no hand-over. A thread
    that has nothing to do is not woken.

Time
    A transfer sleeps for what the model says, then moves its bytes, which comes on top: a tenth to a third of the
    stated time. Whoever measures one transfer and whoever measures many therefore find the same bandwidth.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from .._workers import Workers
from ..software import Core, Model
from ..software._work import Work
from ..software.rules import Command, Kind, Stream
from ._runner import Runner

__all__ = ["HostCore"]

_LAUNCH_FAILED = 719


class HostCore(Core):
    """State of one host driver."""

    name = "host"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._runners: list[Runner] = []
        self._idle: list[Runner] = []  # last in, first out: the one that ran last is warm
        self._due: deque[Callable[[], object]] = deque()  # host functions that have been reached
        self._calling = threading.Lock()
        self._synchronizing: set[threading.Event] = set()
        self._workers = Workers()
        # Not at exit: the process must be able to drain then, and daemon threads end by themselves.
        weakref.finalize(self, _abandon, os.getpid(), self._runners).atexit = False

    def _threads(self) -> int:
        return self._workers.alive + sum(runner.is_alive for runner in list(self._runners))

    def _dismiss(self) -> None:
        self._workers.close()
        self._faulted()
        for runner in list(self._runners):
            runner.dismiss()

    # Progress

    def _seconds(self, kind: Kind, work: Work) -> None:
        """The runner says when it is over."""

    def _reached(self, function: Callable[[], object]) -> None:
        self._due.append(function)

    def _advance(self) -> None:
        if self._refusal is None and not self._machine.is_settled:
            for command in self._step(time.monotonic()).starts:
                self._hand_over(command)

    def _hand_over(self, command: Command) -> None:
        if self._idle:
            runner = self._idle.pop()
        else:
            try:
                runner = Runner(f"aiocuda-host-{len(self._runners)}")
            except RuntimeError as error:  # the process can have no more threads: say so, instead of never completing
                self._fail(_LAUNCH_FAILED, command.stream.device, f"no thread for a {command.kind}: {error}", error)
                return
            self._runners.append(runner)
        runner.assign(self._run, command)

    def _run(self, runner: Runner, command: Command) -> Command | None:
        """On a runner: do a command, end it, and return what to go on with."""
        work: Work = command.action
        due = command.started + work.seconds
        if work.is_transfer:
            runner.sleep_until(due)
        if self._refusal is None:
            self._perform(command)
        if not work.is_transfer and self._refusal is None:
            runner.sleep_until(due)
        return self._end(runner, command)

    def _end(self, runner: Runner, command: Command) -> Command | None:
        mine: Command | None = None
        with self._lock:
            if self._refusal is None:
                command.action = None
                self._machine.finish(command, time.monotonic())
                starts = self._step(time.monotonic()).starts
                if starts:
                    # A kernel runs at once, and a transfer sleeps first: whoever takes that may wake up late.
                    index = next((i for i, c in enumerate(starts) if c.kind == "kernel"), 0)
                    mine = starts.pop(index)
                    for other in starts:
                        self._hand_over(other)
            if mine is None:
                self._idle.append(runner)
        self._call()
        return mine

    def _call(self) -> None:
        """Call the host functions that have been reached, one after the other. The lock is not held."""
        while self._due and self._calling.acquire(blocking=False):
            try:
                while self._due:
                    self._due.popleft()()
            finally:
                self._calling.release()  # then look again: somebody may have come who could not acquire it

    # Waiting, on worker threads only

    def _synchronize(self, streams: list[Stream], then: Callable[[], object]) -> None:
        reached: list[threading.Event] = []
        with self._lock:
            for stream in streams:
                if not stream.is_idle:
                    event = threading.Event()
                    reached.append(event)
                    self._synchronizing.add(event)
                    self._submit(stream, "call", event.set)
        self._call()
        for event in reached:
            if self._refusal is None:
                event.wait()
            self._synchronizing.discard(event)
        then()

    def _faulted(self) -> None:
        """Nobody waits any more."""
        for event in list(self._synchronizing):
            event.set()


def _abandon(pid: int, runners: list[Runner]) -> None:
    if os.getpid() == pid:  # a forked child has none of the threads
        for runner in list(runners):
            runner.dismiss()
