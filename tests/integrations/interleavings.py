"""Random interleavings of coroutines that share one thread's state.

The state stands for PyTorch's current stream: one variable of the thread. Each coroutine has a stream of its own, may
change to another one for a while, and notes a violation when it sees a stream that it has not set. Between the steps
the scheduler checks that the thread has its default.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

DEFAULT = "default"

#: `per_step`, or a variant of it.
PerStep: TypeAlias = Callable[[Callable[[], AbstractContextManager[object]]], Callable[[Any], Any]]


class MistakeError(Exception):
    """Raised by the coroutines, and thrown into them."""


class Thread:
    """The state of the thread, and the violations that were seen."""

    def __init__(self) -> None:
        self.stream = DEFAULT
        self.violations: list[str] = []
        self.seen: set[str] = set()  # the kinds of events that occurred

    def check(self, expected: str, where: str) -> None:
        if self.stream != expected:
            self.violations.append(f"{where}: {self.stream} instead of {expected}")


class Entered:
    """The state of one coroutine: its own stream before each step, the one before that after it."""

    def __init__(self, thread: Thread, name: str) -> None:
        self._thread = thread
        self._own = name

    def __enter__(self) -> None:
        self._outer, self._thread.stream = self._thread.stream, self._own

    def __exit__(self, *exc: object) -> None:
        self._own, self._thread.stream = self._thread.stream, self._outer


class Numbers:
    """An asynchronous iterator that awaits, also in its `aclose`."""

    def __init__(self) -> None:
        self._left = 3

    def __aiter__(self) -> Numbers:
        return self

    async def __anext__(self) -> int:
        await pause()
        self._left -= 1
        if self._left < 0:
            raise StopAsyncIteration
        return self._left

    async def aclose(self) -> None:
        await pause()


@types.coroutine
def pause() -> Generator[None, Any, None]:
    """Suspend the coroutine once."""
    yield


def make_task(thread: Thread, per_step: PerStep, name: str, script: random.Random) -> Coroutine[Any, Any, str]:
    """Return a coroutine that does a random series of things on its own stream."""

    async def nested(expected: str) -> None:
        inner = per_step(lambda: Entered(thread, f"{name}/inner"))(inside)
        await inner()
        thread.check(expected, f"{name} after a nested coroutine")

    async def inside() -> None:
        thread.check(f"{name}/inner", f"{name}, nested")
        await pause()
        thread.check(f"{name}/inner", f"{name}, nested, after an await")

    async def act(expected: str) -> None:
        action = script.choice(["pause", "pause", "iterator", "nested", "raise"])
        thread.seen.add(action)
        if action == "pause":
            await pause()
        elif action == "iterator":
            async with contextlib.aclosing(Numbers()) as numbers:
                async for _ in numbers:
                    thread.check(expected, f"{name} in an iterator")
                    if script.random() < 0.3:
                        break
        elif action == "nested":
            await nested(expected)
        else:
            await pause()
            raise MistakeError

    async def body() -> str:
        expected = name
        thread.check(expected, f"{name} at its begin")
        for number in range(script.randrange(1, 8)):
            if script.random() < 0.3:
                thread.stream = expected = f"{name}.{number}"  # as `torch.cuda.set_stream`
            try:
                await act(expected)
            except GeneratorExit:
                thread.seen.add("closed")
                thread.check(expected, f"{name} as it is closed")
                raise
            except MistakeError:
                thread.seen.add("thrown")
                if script.random() < 0.3:
                    raise
            finally:
                thread.check(expected, f"{name} after an await")
        return name

    result: Coroutine[Any, Any, str] = per_step(lambda: Entered(thread, name))(body)()
    return result


def run(seed: int, per_step: PerStep) -> Thread:
    """Run two to five coroutines in a random interleaving, and return what was seen."""
    script = random.Random(seed)
    thread = Thread()
    tasks = [
        make_task(thread, per_step, f"stream-{number}", random.Random(script.random()))
        for number in range(script.randrange(2, 6))
    ]
    while tasks:
        task = script.choice(tasks)
        what = script.choices(["send", "throw", "close"], [12, 2, 1])[0]
        try:
            if what == "send":
                task.send(None)
            elif what == "throw":
                task.throw(MistakeError())  # as a cancellation arrives
            else:
                task.close()
                tasks.remove(task)
        except StopIteration as stop:
            thread.seen.add(f"returned {stop.value is not None}")
            tasks.remove(task)
        except MistakeError:
            thread.seen.add("failed")
            tasks.remove(task)
        except RuntimeError as error:
            if str(error) != "coroutine ignored GeneratorExit":  # it has awaited `aclose` while it was closed
                raise
            thread.seen.add("closed")
            tasks.remove(task)
        thread.check(DEFAULT, f"after {what}")
    return thread
