"""One seed, one run; and many of them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from statistics import median

from ...completion.operation import TRANSITIONS, State
from ...driver.simulated import SimulatedDriver
from ...errors import DeviceFault
from .check import Checker, ViolationError
from .loop import LostWakeupError, SimulatedLoop
from .program import Program

__all__ = ["REPLAYED", "Outcome", "Sweep", "simulate", "sweep"]

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


def simulate(seed: int, *, trace: bool = False) -> Outcome:
    """Run one seed: a random program on a driver with random upsets, its invariants looked at after each step."""
    driver = SimulatedDriver(seed, upsets=None)
    if trace:
        driver.trace = []
    checker = Checker(driver)
    program = Program(seed, driver, checker)
    where = _run(program, checker)
    gc.collect()  # what has failed holds itself by its traceback
    if not checker.violations:
        checker.end()
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


def _run(program: Program, checker: Checker) -> str:
    """Run it on a loop of its own; the traceback of what nobody has foreseen."""
    loop = SimulatedLoop()
    loop.on_step = checker.step
    loop.set_exception_handler(_swallow)  # failures that the program does not read
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # streams that it drops
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(program.main())
        except (ViolationError, DeviceFault):
            pass
        except LostWakeupError as error:
            checker.found(f"V1 {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, no program may end by it
            checker.found(f"P27 {type(error).__name__}: {error}")
            return traceback.format_exc()
    return ""


def _swallow(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    pass


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
    first: int, most: int | None, seconds: float | None, told: Callable[[Outcome], object] | None = None
) -> Sweep:
    """Run one seed after the other, until one breaks an invariant, or there were enough.

    Parameters
    ----------
    first
        The first seed.
    most
        So many seeds; None as many as there is time for.
    seconds
        Real time; None as long as it takes.
    told
        Called with each outcome.
    """
    result = Sweep(first)
    began = time.monotonic()
    gc.collect()
    gc.freeze()  # what is loaded by now stays: a collection after each seed is cheap then
    try:
        while (most is None or result.seeds < most) and (seconds is None or time.monotonic() - began < seconds):
            seed = first + result.seeds
            replayed = result.seeds % REPLAYED == 0
            outcome = simulate(seed, trace=replayed)
            if replayed and not outcome.violations and simulate(seed, trace=True).trace != outcome.trace:
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
