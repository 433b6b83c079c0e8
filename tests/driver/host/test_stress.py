from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aiocuda._base._types import Span
from aiocuda.driver.host import HostDriver
from aiocuda.driver.protocol import Program
from tests.driver.host.kit import PATIENCE, Rig, address_of

WORDS = 64
NBYTES = 8 * WORDS


def mix(target: npt.NDArray[np.uint64], source: npt.NDArray[np.uint64], factor: np.uint64) -> None:
    """Order matters: no two calls commute."""
    np.multiply(target, factor, out=target)
    np.add(target, source, out=target)


@dataclasses.dataclass
class Step:
    """One command of a random program, and what must be done before it."""

    stream: int
    verb: str
    target: int
    source: int
    number: int
    after: list[int]
    event: int = 0
    recorded: threading.Event = dataclasses.field(default_factory=threading.Event)


def random_program(rng: random.Random, length: int, streams: int, buffers: int) -> list[Step]:
    """Steps with a dependency for each hazard: read after write, write after read, write after write."""
    steps: list[Step] = []
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {buffer: [] for buffer in range(buffers)}
    for number in range(length):
        verb = rng.choice(["upload", "fill", "copy", "kernel", "kernel", "download", "renew"])
        target, source = rng.sample(range(buffers), 2)
        reads = {"copy": [source], "kernel": [source, target], "download": [target]}.get(verb, [])
        writes = [] if verb == "download" else [target]
        after = {writer[each] for each in (*reads, *writes) if each in writer}
        for each in writes:
            after.update(readers[each])
        for each in reads:
            readers[each].append(number)
        for each in writes:
            writer[each] = number
            readers[each] = []
        stream = rng.randrange(streams)
        steps.append(Step(stream, verb, target, source, number, [i for i in after if steps[i].stream != stream]))
    return steps


class Oracle:
    """The same, one step after the other, on the host."""

    def __init__(self, buffers: int) -> None:
        self.buffers = [np.zeros(WORDS, "u8") for _ in range(buffers)]
        self.downloads: dict[int, npt.NDArray[np.uint64]] = {}

    def run(self, step: Step) -> None:
        target = self.buffers[step.target]
        match step.verb:
            case "upload":
                target[:] = np.arange(WORDS) + step.number
            case "fill":
                target[:] = step.number
            case "copy":
                target[:] = self.buffers[step.source]
            case "kernel":
                mix(target, self.buffers[step.source], np.uint64(2 * step.number + 3))
            case "download":
                self.downloads[step.number] = target.copy()
            case "renew":
                target[:] = step.number


class Runner:
    """The program on a driver: each thread enqueues the steps of its own streams."""

    def __init__(self, rig: Rig, steps: list[Step], streams: int, buffers: int, rng: random.Random) -> None:
        self.rig = rig
        self.driver = rig.driver
        self.steps = steps
        self.streams = [rig.stream(priority=-rng.randrange(6)) for _ in range(streams)]
        self.buffers = [self.driver.allocate(0, NBYTES, self.streams[0]) for _ in range(buffers)]
        for address in self.buffers:
            self.driver.fill(self.streams[0], address, b"\0", NBYTES)
        rig.finish(self.streams[0])
        self.downloads = {step.number: rig.pinned(np.zeros(WORDS), "u8") for step in steps if step.verb == "download"}
        self.uploads = {
            step.number: rig.pinned(np.arange(WORDS) + step.number, "u8") for step in steps if step.verb == "upload"
        }
        seconds = [None, 2e-5, 2e-4]
        self.functions = [self.driver.load(0, Program("mix", "PPQ", host=mix, host_seconds=each)) for each in seconds]
        self.pick = [rng.randrange(len(seconds)) for _ in steps]
        self.failures: list[BaseException] = []

    def enqueue(self, step: Step) -> None:
        stream = self.streams[step.stream]
        for other in step.after:
            assert self.steps[other].recorded.wait(PATIENCE), "the thread of an earlier step has failed"
            self.driver.stream_wait(stream, self.steps[other].event)
        target, source = self.buffers[step.target], self.buffers[step.source]
        match step.verb:
            case "upload":
                self.driver.upload(stream, target, address_of(self.uploads[step.number]), NBYTES)
            case "fill":
                self.driver.fill(stream, target, step.number.to_bytes(8, "little"), WORDS)
            case "copy":
                self.driver.copy(stream, target, source, NBYTES)
            case "kernel":
                function = self.functions[self.pick[step.number]]
                launch = self.driver.launcher(stream, function, (1, 1, 1), (1, 1, 1), 0)
                pointers: list[Any] = [self.driver.argument(Span(each, (WORDS,), "<u8")) for each in (target, source)]
                launch([*pointers, 2 * step.number + 3])
            case "download":
                self.driver.download(stream, address_of(self.downloads[step.number]), target, NBYTES)
            case "renew":
                self.driver.deallocate(target, stream)
                self.buffers[step.target] = self.driver.allocate(0, NBYTES, stream)
                self.driver.fill(stream, self.buffers[step.target], step.number.to_bytes(8, "little"), WORDS)
        step.event = self.rig.record(stream)
        step.recorded.set()

    def run(self, threads: int) -> None:
        """Enqueue everything from several threads, then wait for the device."""
        workers = [
            threading.Thread(target=self._guarded, args=(self._share(number, threads),)) for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if self.failures:
            raise self.failures[0]
        self.rig.finish(*self.streams)

    def _share(self, number: int, threads: int) -> Callable[[], None]:
        def enqueue_own() -> None:
            for step in self.steps:
                if step.stream % threads == number:
                    self.enqueue(step)

        return enqueue_own

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failures.append(error)
            raise


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_leave_what_a_serial_oracle_leaves(seed: int) -> None:
    rng = random.Random(seed)
    streams, buffers = 7, 5
    steps = random_program(rng, 250, streams, buffers)
    rig = Rig(HostDriver(bandwidth=math.inf, latency=rng.choice([0.0, 2e-5])))
    oracle, runner = Oracle(buffers), Runner(rig, steps, streams, buffers, rng)
    for step in steps:
        oracle.run(step)
    runner.run(threads=3)
    for number, expected in oracle.downloads.items():
        assert (runner.downloads[number] == expected).all(), f"download {number} of seed {seed}"
    for index, (address, expected) in enumerate(zip(runner.buffers, oracle.buffers, strict=True)):
        found = rig.download(runner.streams[0], address, WORDS, "u8")
        assert (found == expected).all(), f"buffer {index} of seed {seed}"
    assert rig.driver.fault is None
    for address in runner.buffers:
        rig.driver.deallocate(address, runner.streams[0])
    rig.finish(runner.streams[0])
    rig.driver.pool_trim(0, 0)
    assert rig.driver.pool_reserved(0) == 0
    rig.driver.close()
