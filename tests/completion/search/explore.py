"""Explore every schedule of a small system, depth first.

A stateless model checker, after VeriSoft (Godefroid 1997). The system is real code, so its state cannot be copied: to
try another choice, the search runs the system again from the beginning. The system gives its canonical state; the
search does not continue from a state that it has reached before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["Action", "Counterexample", "Exploration", "System", "Trail", "explore", "replay"]

#: A possible next action: a format string for its name, the argument of that string, a function and its arguments. The
#: name is formatted only if it is needed.
Action: TypeAlias = "tuple[str, object, Callable[..., object], tuple[Any, ...]]"


class Trail:
    """The choices of one run: the prefix of an earlier run is repeated, then the first possibility is always taken."""

    __slots__ = ("_at", "_choices", "_prefix", "_widths")

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self._choices = list(choices)
        self._widths = [0] * len(self._choices)
        self._prefix = len(self._choices)
        self._at = 0

    @property
    def is_new(self) -> bool:
        """True if the prefix has been repeated, so that the current state may be new."""
        return self._at >= self._prefix

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices up to now. `replay` repeats them."""
        return tuple(self._choices[: self._at])

    def choose(self, width: int) -> int:
        """Return a choice among ``width`` possibilities."""
        if width == 1:
            return 0
        if self._at == len(self._choices):
            self._choices.append(0)
            self._widths.append(width)
        self._widths[self._at] = width
        choice = self._choices[self._at]
        self._at += 1
        assert choice < width, "the same choices gave another state: the system does not depend on them alone"
        return choice

    def backtrack(self) -> bool:
        """Go back to the last choice with an untried possibility, and take that one. Return False if there is none."""
        while self._choices:
            if self._choices[-1] + 1 < self._widths[-1]:
                self._choices[-1] += 1
                self._prefix, self._at = len(self._choices), 0
                return True
            self._choices.pop()
            self._widths.pop()
        return False


class System(Protocol):
    """A system to explore. Its behaviour depends only on the choices that it asks for."""

    #: The violations found up to now.
    violations: list[str]

    def enabled(self) -> list[Action]:
        """Return the possible next actions; none at the end of a schedule."""

    def state(self) -> Hashable:
        """Return everything that can influence what happens next."""

    def check(self) -> None:
        """Look for violations."""

    def release(self) -> None:
        """Release everything. The run is over, perhaps before its end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counterexample:
    """A schedule that ends in a violation."""

    violation: str
    schedule: tuple[str, ...]
    choices: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.violation}\n  after " + ", ".join(self.schedule)


@dataclasses.dataclass(slots=True)
class Exploration:
    """The result of a search: its size, and the counterexample if there is one."""

    states: int = 0
    runs: int = 0  #: each from the beginning to a known state or to its end
    ends: int = 0  #: runs that reached their end
    longest: int = 0  #: the number of actions of the longest run
    found: Counterexample | None = None


def explore(build: Callable[[Trail], System], *, max_states: int = 10_000_000) -> Exploration:
    """Explore every schedule, or stop at the first violation.

    Raises
    ------
    AssertionError
        There are more than ``max_states`` states.
    """
    exploration, seen, trail = Exploration(), set[Hashable](), Trail()
    while exploration.found is None:
        _run(build, trail, seen, exploration)
        if not trail.backtrack():
            break
        assert len(seen) <= max_states, (
            f"more than {max_states} states: the canonical state contains a value that only grows"
        )
    exploration.states = len(seen)
    return exploration


def replay(build: Callable[[Trail], System], choices: Sequence[int]) -> Counterexample | None:
    """Run one schedule again."""
    exploration = Exploration()
    _run(build, Trail(choices), set(), exploration)
    return exploration.found


def _run(build: Callable[[Trail], System], trail: Trail, seen: set[Hashable], exploration: Exploration) -> None:
    system = build(trail)
    schedule: list[Action] = []
    exploration.runs += 1
    try:
        while True:
            if trail.is_new:
                state = system.state()
                if state in seen:
                    break
                seen.add(state)
            actions = system.enabled()
            if not actions:
                exploration.ends += 1
                break
            action = actions[trail.choose(len(actions))]
            schedule.append(action)
            action[2](*action[3])
            system.check()
            if system.violations:
                exploration.found = Counterexample(
                    system.violations[0], tuple(name.format(thing) for name, thing, _, _ in schedule), trail.choices
                )
                break
    finally:
        exploration.longest = max(exploration.longest, len(schedule))
        system.release()
