"""One seed, one run; and many of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from statistics import median
from typing import Any, TypeAlias

from ...completion._operation import TRANSITIONS, State
from ...driver.simulated import SimulatedDriver
from ...errors import DeviceFault
from .check import Checker, ViolationError
from .loop import LostWakeupError, SimulatedLoop
from .program import Program

__all__ = ["REPLAYED", "Outcome", "Sweep", "simulate", "sweep", "watch"]

Main: TypeAlias = Callable[[], Coroutine[Any, Any, object]]

#: One seed in so many is run twice, and does the same again: V15.
REPLAYED = 20


@dataclasses.dataclass(slots=True)
class Outcome:
    """What one seed did."""

    seed: int
    violations: list[str]
    operations: int
    streams: int
    upsets: Counter[str]
    actions: Counter[str]
    transitions: set[tuple[State, State]]
    trace: list[str]
    where: str = ""  #: the traceback of an error that is none of aiocuda's


def simulate(
    seed: int, *, trace: bool = False, driver: SimulatedDriver | None = None, asynchronous: bool = True
) -> Outcome:
    """Run one seed: a random program on a driver with random upsets, its invariants looked at after each step.

    Parameters
    ----------
    seed
        Decides.
    trace
        Write down what the driver does.
    driver
        Another one than the seed's own.
    asynchronous
        False: the same program on default streams only.
    """
    driver = SimulatedDriver(seed, devices=Program.devices(seed), upsets=None) if driver is None else driver
    if trace:
        driver.trace = []
    checker = Checker(driver)
    program = Program(seed, driver, checker, asynchronous=asynchronous)
    if program.vanishes is None:
        where = watch(program.main, checker)
    else:
        where = watch(program.begin, checker, closed_after=program.vanishes, then=program.end)
    driver.close()
    actions = program.actions
    return Outcome(
        seed,
        checker.violations,
        0 if actions is None else actions.operations,
        0 if actions is None else actions.streams,
        driver.upsets.happened,
        Counter() if actions is None else Counter(actions.done),
        checker.transitions,
        driver.trace or [],
        where,
    )


def watch(main: Main, checker: Checker, *, closed_after: float | None = None, then: Main | None = None) -> str:
    """Run a coroutine on a loop of its own and look at it after each step; the traceback of what nobody has foreseen.

    What is wrong stands in the checker's ``violations``.

    Parameters
    ----------
    main
        What is run.
    checker
        Looks.
    closed_after
        Virtual seconds after which the loop is closed under it; None runs it to its end.
    then
        Run on another loop in that case.
    """
    checker.heard.loop_goes = closed_after is not None
    with warnings.catch_warnings(), _unheard_tasks(), _no_collector():
        warnings.simplefilter("ignore", ResourceWarning)  # streams that it drops
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that go with their loop
        where = _guarded(checker, lambda: _run(main, checker, closed_after))
        if then is not None:
            gc.collect()  # tasks that nobody ends any more
            where = _guarded(checker, lambda: _run(then, checker, None)) or where
        for _ in range(2):  # what has failed holds itself by its traceback, and that perhaps a coroutine with a finally
            gc.collect()
        if not checker.violations:
            checker.end(loop_closed=closed_after is not None)
        checker.at_end.clear()  # which hold what they look at, and that perhaps tasks of a loop that was closed
        gc.collect()
    return where


def _run(main: Main, checker: Checker, closed_after: float | None) -> None:
    loop = SimulatedLoop()
    loop.on_step = checker.step
    loop.set_exception_handler(checker.heard.told)
    if closed_after is None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
        return
    task = loop.create_task(main())
    loop.call_later(closed_after, loop.stop)
    try:
        loop.run_forever()
        if task.done():
            task.result()
    finally:
        loop.close()


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Finalisers of what holds itself run when the collector comes, which depends on all that was run before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _unheard_tasks() -> Iterator[None]:
    """A task that is destroyed with its loop may want to await something in its end: Python says so on stderr."""

    def unheard(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RuntimeError):
            hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, unheard
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _guarded(checker: Checker, run: Callable[[], None]) -> str:
    """Run it; the traceback of what nobody has foreseen."""
    try:
        run()
    except (ViolationError, DeviceFault):
        pass  # the checker has the one, and the other was planned, or is told by what waits for it
    except LostWakeupError as error:
        checker.found(f"V1 {error}")
    except Exception as error:  # noqa: BLE001 - whatever it is, no program may end by it
        checker.unforeseen(error)
        return traceback.format_exc()
    return ""


@dataclasses.dataclass(slots=True)
class Sweep:
    """What many seeds did."""

    first: int
    seeds: int = 0
    seconds: float = 0.0
    #: ``seed S: V6 ...``, of the seed that ended it.
    violations: list[str] = dataclasses.field(default_factory=list)
    operations: list[int] = dataclasses.field(default_factory=list)
    streams: list[int] = dataclasses.field(default_factory=list)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    transitions: set[tuple[State, State]] = dataclasses.field(default_factory=set)
    where: str = ""

    def report(self) -> dict[str, object]:
        """As JSON has it."""
        steps = {(before, after) for before, afters in TRANSITIONS.items() for after in afters}
        return {
            "first": self.first,
            "seeds": self.seeds,
            "seconds": round(self.seconds, 3),
            "violations": self.violations,
            "operations_median": median(self.operations or [0]),
            "streams_median": median(self.streams or [0]),
            "faults": dict(sorted(self.faults.items())),
            "transitions_unseen": sorted(
                f"{before.name.lower()} -> {after.name.lower()}" for before, after in steps - self.transitions
            ),
        }


def sweep(
    first: int, most: int | None, seconds: float | None, told: Callable[[Outcome], object] | None = None, *,
    asynchronous: bool = True,
) -> Sweep:  # fmt: skip
    """Run one seed after the other, until one breaks an invariant, or there were enough.

    Parameters
    ----------
    first
        The first seed.
    most
        So many seeds; None as many as there is time for.
    seconds
        Real time, and one seed at least; None as long as it takes.
    told
        Called with each outcome.
    asynchronous
        As `simulate` takes it.
    """
    result = Sweep(first)
    began = time.monotonic()
    gc.collect()
    gc.freeze()  # what is loaded by now stays: a collection after each seed is cheap then
    try:
        while (most is None or result.seeds < most) and (
            seconds is None or not result.seeds or time.monotonic() - began < seconds
        ):
            seed = first + result.seeds
            replayed = result.seeds % REPLAYED == 0
            outcome = simulate(seed, trace=replayed, asynchronous=asynchronous)
            if replayed and not outcome.violations:
                again = simulate(seed, trace=True, asynchronous=asynchronous)
                if again.trace != outcome.trace:
                    outcome.violations.append("V15 it does something else when it is run again")
            result.seeds += 1
            result.operations.append(outcome.operations)
            result.streams.append(outcome.streams)
            result.faults += outcome.upsets + outcome.actions
            result.transitions |= outcome.transitions
            if told is not None:
                told(outcome)
            if outcome.violations:
                result.violations = [f"seed {seed}: {text}" for text in outcome.violations]
                result.where = outcome.where
                break
    finally:
        gc.unfreeze()
    result.seconds = time.monotonic() - began
    return result
