"""Run the program of one seed, or of many seeds one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from statistics import median
from typing import Any, TypeAlias

from aiocuda.driver.simulated import SimulatedDriver
from aiocuda.errors import DeviceFault
from aiocuda.testing import LostWakeupError, SimulatedLoop
from tests.simulation.checker import Checker, ViolationError
from tests.simulation.internals import TRANSITIONS, State
from tests.simulation.program import Program

__all__ = ["REPLAYED", "Outcome", "Sweep", "simulate", "sweep", "watch"]

Main: TypeAlias = Callable[[], Coroutine[Any, Any, object]]

#: One seed in so many is run twice, and both runs must be the same: V15.
REPLAYED = 20


@dataclasses.dataclass(slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    violations: list[str]
    operations: int
    streams: int
    upsets: Counter[str]  #: the injected faults
    actions: Counter[str]
    transitions: set[tuple[State, State]]
    trace: list[str]
    traceback: str = ""  #: of an unexpected error


def simulate(
    seed: int, *, trace: bool = False, driver: SimulatedDriver | None = None, asynchronous: bool = True
) -> Outcome:
    """Run the program of one seed, and check the invariants after each step.

    Parameters
    ----------
    seed
        Decides the program and what the device does.
    trace
        Record the trace of the driver.
    driver
        Another driver than the seed's own.
    asynchronous
        False: run the same program on default streams only.
    """
    driver = SimulatedDriver(seed, devices=Program.device_count(seed), upsets=None) if driver is None else driver
    if trace:
        driver.trace = []
    checker = Checker(driver)
    program = Program(seed, driver, checker, asynchronous=asynchronous)
    if program.close_loop_after is None:
        unexpected = watch(program.main, checker)
    else:
        unexpected = watch(program.start, checker, close_loop_after=program.close_loop_after, then=program.close)
    driver.close()
    actions = program.actions
    return Outcome(
        seed,
        checker.violations,
        0 if actions is None else actions.operation_count,
        0 if actions is None else actions.stream_count,
        driver.upsets.happened,
        Counter() if actions is None else Counter(actions.counts),
        checker.transitions,
        driver.trace or [],
        unexpected,
    )


def watch(main: Main, checker: Checker, *, close_loop_after: float | None = None, then: Main | None = None) -> str:
    """Run a coroutine function on a new `SimulatedLoop` and check the invariants after each step.

    Return the traceback of an unexpected error, or an empty string. The checker has the violations.

    Parameters
    ----------
    main
        The coroutine function.
    checker
        Checks the invariants.
    close_loop_after
        Virtual seconds after which the loop is closed while ``main`` runs; None runs it to its end.
    then
        Run on another loop after that.
    """
    checker.errors.loop_closes_early = close_loop_after is not None
    with warnings.catch_warnings(), _quiet_unraisable_errors(), _no_automatic_collections():
        warnings.simplefilter("ignore", ResourceWarning)  # programs drop streams
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that end with their loop were never awaited
        unexpected = _run_guarded(checker, lambda: _run(main, checker, close_loop_after))
        if then is not None:
            gc.collect()  # the tasks of the closed loop
            unexpected = _run_guarded(checker, lambda: _run(then, checker, None)) or unexpected
        # An error holds itself by its traceback, and perhaps a coroutine. The `finally` of that makes further garbage.
        for _ in range(2):
            gc.collect()
        if not checker.violations:
            checker.end(loop_closed=close_loop_after is not None)
        checker.final_checks.clear()  # they hold what they check, and perhaps tasks of a closed loop
        gc.collect()
    return unexpected


def _run(main: Main, checker: Checker, close_loop_after: float | None) -> None:
    loop = SimulatedLoop()
    loop.on_step = checker.step
    loop.set_exception_handler(checker.errors.handle_exception)
    if close_loop_after is None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
        return
    task = loop.create_task(main())
    loop.call_later(close_loop_after, loop.stop)
    try:
        loop.run_forever()
        if task.done():
            task.result()
    finally:
        loop.close()


@contextlib.contextmanager
def _no_automatic_collections() -> Iterator[None]:
    """Disable the garbage collector: when it runs on its own depends on everything that ran before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _quiet_unraisable_errors() -> Iterator[None]:
    """Ignore the RuntimeError of a task that is destroyed with its loop and awaits something in a ``finally``."""

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RuntimeError):
            original(unraisable)

    original, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield
    finally:
        sys.unraisablehook = original


def _run_guarded(checker: Checker, run: Callable[[], None]) -> str:
    """Call ``run`` and report its errors. Return the traceback of an unexpected one."""
    try:
        run()
    except (ViolationError, DeviceFault):
        pass  # the checker has recorded the violation; a fault was injected, or the waiters of operations report it
    except LostWakeupError as error:
        checker.report(f"V1 {error}")
    except Exception as error:  # noqa: BLE001 - a program may end by no other error
        checker.report_error(error)
        return traceback.format_exc()
    return ""


@dataclasses.dataclass(slots=True)
class Sweep:
    """The result of many seeds."""

    first: int
    seeds: int = 0
    seconds: float = 0.0
    #: ``seed S: V6 …``, for the seed that ended the sweep.
    violations: list[str] = dataclasses.field(default_factory=list)
    operations: list[int] = dataclasses.field(default_factory=list)
    streams: list[int] = dataclasses.field(default_factory=list)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)  #: injected faults and counted actions
    transitions: set[tuple[State, State]] = dataclasses.field(default_factory=set)
    traceback: str = ""

    def report(self) -> dict[str, object]:
        """Return the figures that ``--json`` writes."""
        possible = {(before, after) for before, afters in TRANSITIONS.items() for after in afters}
        return {
            "first": self.first,
            "seeds": self.seeds,
            "seconds": round(self.seconds, 3),
            "violations": self.violations,
            "operations_median": median(self.operations or [0]),
            "streams_median": median(self.streams or [0]),
            "faults": dict(sorted(self.faults.items())),
            "transitions_unseen": sorted(
                f"{before.name.lower()} -> {after.name.lower()}" for before, after in possible - self.transitions
            ),
        }


@contextlib.contextmanager
def _limited(seed: int, seconds: float | None) -> Iterator[None]:
    """End the process with the stacks of its threads, if the program of a seed hangs."""

    def end() -> None:
        print(f"seed {seed}: does not end within {seconds:g} s", flush=True)  # noqa: T201 - the process ends
        faulthandler.dump_traceback()
        os._exit(1)

    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def sweep(
    first: int,
    most: int | None,
    seconds: float | None,
    *,
    asynchronous: bool = True,
    longest: float | None = None,
) -> Sweep:
    """Run one seed after the other, until one violates an invariant, or the limits are reached.

    Parameters
    ----------
    first
        The first seed.
    most
        The number of seeds; None for no limit.
    seconds
        Real time, after which no further seed begins; None for no limit.
    asynchronous
        See `simulate`.
    longest
        Real seconds after which the process ends, if one seed takes longer; None for no limit.
    """
    result = Sweep(first)
    began = time.monotonic()
    gc.collect()
    is_frozen = gc.get_freeze_count() > 0  # by the tests
    gc.freeze()  # the collections of each seed then skip all objects that exist now
    try:
        while (most is None or result.seeds < most) and (
            seconds is None or not result.seeds or time.monotonic() - began < seconds
        ):
            seed = first + result.seeds
            replayed = result.seeds % REPLAYED == 0
            with _limited(seed, longest):
                outcome = simulate(seed, trace=replayed, asynchronous=asynchronous)
                if replayed and not outcome.violations:
                    again = simulate(seed, trace=True, asynchronous=asynchronous)
                    if again.trace != outcome.trace:
                        outcome.violations.append("V15 a second run of this seed differs from the first")
            result.seeds += 1
            result.operations.append(outcome.operations)
            result.streams.append(outcome.streams)
            result.faults += outcome.upsets + outcome.actions
            result.transitions |= outcome.transitions
            if outcome.violations:
                result.violations = [f"seed {seed}: {text}" for text in outcome.violations]
                result.traceback = outcome.traceback
                break
    finally:
        if not is_frozen:
            gc.unfreeze()
    result.seconds = time.monotonic() - began
    return result
