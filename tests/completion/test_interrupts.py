"""The sweep of interrupts finds each place at which Ctrl-C can take effect, on each version of Python."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Generator
from types import CodeType, ModuleType
from typing import Any

import pytest

from tests.completion.interrupts import sweep

SOURCE = """
def count(step):
    step()
    for _ in range(2):
        step()

def produce(step):
    step()
    yield
    step()

def catch(step):
    try:
        yield
    except ValueError:
        step()
"""

#: Until Python 3.12, a place is where a jump leads to. It is also reached without the jump, when the loop begins.
BEFORE_JUMPS = [1] if sys.version_info < (3, 13) else []


@pytest.fixture
def module() -> ModuleType:
    made = ModuleType("swept")
    made.__file__ = "swept.py"
    return made


def new(module: ModuleType, name: str) -> Callable[[Callable[[], object]], Any]:
    """Return the function ``name`` of `SOURCE`, with code that has never run."""
    code: CodeType = compile(SOURCE, str(module.__file__), "exec")
    exec(code, vars(module))
    return vars(module)[name]  # type: ignore[no-any-return]


class Steps:
    """Counts its calls, in C: the function that calls it has only its own places."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)
        self.step = self._calls.__next__

    @property
    def done(self) -> int:
        return next(self._calls) - 1


@pytest.mark.parametrize("first_call", [True, False])
def test_function_is_interrupted_at_its_start_after_calls_and_at_jumps(module: ModuleType, first_call: bool) -> None:
    done = []
    function = new(module, "count")
    for interrupt in sweep(module, least=7):
        steps = Steps()
        if first_call:
            function = new(module, "count")
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            function(steps.step)
        done.append(steps.done)
    assert done == [0, 1, 1, *BEFORE_JUMPS, 2, 2, 3, 3, 3]  # the last time, there is no interrupt


def resume(generator: Generator[None]) -> None:
    next(generator, None)


def throw(generator: Generator[None]) -> None:
    with contextlib.suppress(StopIteration):
        generator.throw(ValueError)


@pytest.mark.parametrize(("name", "go_on", "expected"), [("produce", resume, [1, 2, 2]), ("catch", throw, [1, 1])])
def test_generator_that_began_before_is_interrupted(
    module: ModuleType, name: str, go_on: Callable[[Generator[None]], None], expected: list[int]
) -> None:
    done = []
    for interrupt in sweep(module, least=len(expected) - 1):
        steps = Steps()
        generator = new(module, name)(steps.step)
        next(generator)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            go_on(generator)
        done.append(steps.done)
    assert done == expected


def test_other_threads_are_not_interrupted(module: ModuleType) -> None:
    function, steps = new(module, "count"), Steps()

    def elsewhere() -> None:
        thread = threading.Thread(target=function, args=(steps.step,))
        thread.start()
        thread.join()

    for interrupt in sweep(module, least=7):
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            elsewhere()
            function(int)
        assert (interrupt.where or "count").startswith("count")
    assert steps.done == 3 * (8 + len(BEFORE_JUMPS))
