"""`Run`: collects the tests, and runs them in many processes and in parts."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from .process import Ended, run_pytest
from .results import AGAIN, ALONE, BESIDE, FEW, Attempt, Results

#: A test with the mark ``slow`` counts as so many others.
_SLOW = 8

#: The least work of a process. To start one takes about as long as so many tests: CUDA makes contexts one after the
#: other, each with 32 hardware queues in more than a second.
_LEAST = 100

#: The most failures that run again. If more tests fail, something is wrong that another run does not explain.
_MOST_AGAIN = 40


class RunError(Exception):
    """Nothing can run: there is no GPU, or pytest refuses the arguments."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A test that was collected."""

    id: str
    argument: str  #: its id for pytest, with an absolute path
    alone: bool
    few: bool
    slow: bool
    limit: float | None  #: the seconds of its mark ``timeout``, which only long tests have

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]

    @property
    def work(self) -> float:
        return max(_SLOW if self.slow else 1, (self.limit or 0) / 4)


class Queue:
    """Tests that no process has taken yet, file by file: first those with slow tests, then those with many."""

    def __init__(self, tests: Iterable[Case], processes: int) -> None:
        files: dict[str, list[Case]] = {}
        for test in tests:
            files.setdefault(test.file, []).append(test)
        ordered = sorted(files.values(), key=lambda file: (max(test.work for test in file) == 1, -_work(file)))
        self._left = deque(itertools.chain.from_iterable(ordered))
        self._work = _work(self._left)
        self._processes = processes

    def take(self) -> list[Case]:
        """Return the next tests. The less is left, the fewer they are: so all processes end at about the same time."""
        share = max(_LEAST, 0.7 * self._work / self._processes)
        taken: list[Case] = []
        while self._left and share > 0:
            taken.append(self._left.popleft())
            share -= taken[-1].work
        self._work -= _work(taken)
        return taken


def _work(tests: Iterable[Case]) -> float:
    return sum(test.work for test in tests)


class Run:
    """One run of all tests.

    Parameters
    ----------
    results
        Receives the outcomes.
    folder
        The folder of the logs and reports of the processes.
    processes
        The number of pytest processes in the parallel part.
    seconds
        The longest time of a test that has no mark ``timeout``.
    arguments
        Arguments of each pytest process.
    say
        Prints a line.
    """

    def __init__(
        self,
        results: Results,
        folder: Path,
        *,
        processes: int,
        seconds: float,
        arguments: Sequence[str],
        say: Callable[[str], object],
    ) -> None:
        self._results = results
        self._folder = folder
        self._processes = processes
        self._seconds = seconds
        self._arguments = arguments
        self._say = say
        self._numbers = itertools.count(1)

    async def all(self, files: Sequence[Path]) -> None:
        """Run the tests of these files: beside others, alone, and those that failed again alone."""
        tests = await self._collect(files)
        by_id = {test.id: test for test in tests}

        async def side_by_side(part: str, of_part: Iterable[Case], processes: int) -> None:
            queue = Queue(of_part, processes)

            async def work() -> None:
                while chunk := queue.take():
                    await self._run(part, chunk)

            await self._together(work for _ in range(processes))

        async def beside() -> None:
            shared = (test for test in tests if not test.alone and not test.few)
            await side_by_side(BESIDE, shared, self._processes)

        async def few() -> None:
            shared = (test for test in tests if test.few and not test.alone)
            await side_by_side(FEW, shared, max(1, self._processes // 4))

        async def alone() -> None:
            for _, group in itertools.groupby((test for test in tests if test.alone), lambda test: test.file):
                await self._run(ALONE, list(group))

        async def again() -> None:
            for test in [by_id[test] for test in self._results.failed if test in by_id][:_MOST_AGAIN]:
                await self._run(AGAIN, [test])

        await self._part(BESIDE, beside)
        await self._part(FEW, few)
        await self._part(ALONE, alone)
        await self._part(AGAIN, again)
        self._results.complete = True
        self._results.save()

    async def _part(self, name: str, part: Callable[[], Awaitable[object]]) -> None:
        began = time.monotonic()
        await part()
        self._say(self._results.end_part(name, time.monotonic() - began))
        self._results.save()

    @staticmethod
    async def _together(workers: Iterable[Callable[[], Awaitable[None]]]) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(_awaited(worker()))

    async def _pytest(self, *arguments: str) -> Ended:
        place = self._folder / f"{next(self._numbers)}"
        return await run_pytest(place, [*self._arguments, *arguments], self._seconds)

    async def _collect(self, files: Sequence[Path]) -> list[Case]:
        """Return the tests. Each process imports a part of the files: together they take a few seconds."""
        began = time.monotonic()
        shares = [files[first :: self._processes] for first in range(min(self._processes, len(files)))]
        ended = await asyncio.gather(*(self._pytest("--collect-only", *map(str, share)) for share in shares))
        tests: list[Case] = []
        for each in ended:
            if each.returncode not in (0, 2, 5):  # all was collected, a file has an error, there is no test
                raise RunError(f"pytest cannot collect the tests: {each.cause}\n{each.tail(5)}")
            for event in each.events:
                if event["event"] == "found":
                    facts = {field.name: event[field.name] for field in dataclasses.fields(Case) if field.name != "id"}
                    tests.append(Case(event["test"], **facts))
                elif event["event"] == "skipped":
                    self._results.skipped[event["test"]] = event["text"]
                elif event["event"] == "error":
                    reason = "the file cannot be collected"
                    self._results.add(event["test"], Attempt("collection", "failed", 0.0, reason, event["text"]))
        tests.sort(key=lambda test: test.file)  # stable: those of a file keep their order
        for test in tests:
            self._results.expect(test.id)
        alone = sum(test.alone for test in tests)
        seconds = time.monotonic() - began
        self._say(f"{len(tests)} tests, {alone} of them alone, in {len(files)} files; collected in {seconds:.1f} s")
        return tests

    async def _run(self, part: str, tests: Sequence[Case]) -> None:
        """Run tests in one process. If it ends early, a further process runs the rest."""
        left = {test.id: test for test in tests}
        while left:
            ended = await self._pytest(*(test.argument for test in left.values()))
            last: str | None = None
            for event in ended.events:
                if event["event"] == "ends":
                    last = event["test"]
                    left.pop(last, None)
                    attempt = Attempt(
                        part, event["outcome"], round(event["seconds"], 3), event["reason"], event["text"]
                    )
                    self._note(last, attempt)
            running = ended.running
            failure = Attempt(part, "failed", 0.0, ended.cause, ended.tail())
            if running is not None:
                left.pop(running, None)
                self._note(running, failure)
            elif last is None:  # a further process would not start, either
                for test in left:
                    self._note(test, failure)
                left.clear()
            elif ended.returncode not in (0, 1):
                self._results.replace(last, dataclasses.replace(failure, reason=f"after the last test, {ended.cause}"))
            self._results.save()

    def _note(self, test: str, attempt: Attempt) -> None:
        self._results.add(test, attempt)
        if attempt.outcome == "failed":
            self._say(f"failed, {attempt.part}: {test}: {attempt.reason}")


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable
