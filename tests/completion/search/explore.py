"""Explore: every schedule of a small system, depth first.

A stateless model checker, after VeriSoft (Godefroid 1997): the system is real code, whose state cannot be copied, so
that another choice is tried by running it again from its beginning. What has been reached before, by the canonical
state that the system tells of itself, is not gone into again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["Action", "Found", "Space", "System", "Trail", "explore", "replay"]

#: What may happen next: what it is called, about what, and the doing. The name is put together only if it is needed.
Action: TypeAlias = "tuple[str, object, Callable[..., object], tuple[Any, ...]]"


class Trail:
    """The choices of one run: a prefix that is repeated, then the first of what there is, again and again."""

    __slots__ = ("_at", "_choices", "_prefix", "_widths")

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self._choices = list(choices)
        self._widths = [0] * len(self._choices)
        self._prefix = len(self._choices)
        self._at = 0

    @property
    def is_new(self) -> bool:
        """Has the prefix been repeated, so that this has not been before?"""
        return self._at >= self._prefix

    @property
    def choices(self) -> tuple[int, ...]:
        """So far, to repeat them."""
        return tuple(self._choices[: self._at])

    def choose(self, width: int) -> int:
        """One of so many possibilities."""
        if width == 1:
            return 0
        if self._at == len(self._choices):
            self._choices.append(0)
            self._widths.append(width)
        self._widths[self._at] = width
        choice = self._choices[self._at]
        self._at += 1
        assert choice < width, "the same choices led elsewhere: the system is not a function of them"
        return choice

    def turn(self) -> bool:
        """Back to the last choice that has another possibility left, and take it; False if there is none."""
        while self._choices:
            if self._choices[-1] + 1 < self._widths[-1]:
                self._choices[-1] += 1
                self._prefix, self._at = len(self._choices), 0
                return True
            self._choices.pop()
            self._widths.pop()
        return False


class System(Protocol):
    """What is explored. Whatever it does follows from its choices."""

    #: What must not be and was.
    violations: list[str]

    def enabled(self) -> list[Action]:
        """What may happen next; nothing at the end."""

    def state(self) -> Hashable:
        """All that decides what may come."""

    def check(self) -> None:
        """Look for what must not be."""

    def leave(self) -> None:
        """The run is over, maybe in the middle."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A schedule that leads to what must not be."""

    violation: str
    schedule: tuple[str, ...]
    choices: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.violation}\n  after " + ", ".join(self.schedule)


@dataclasses.dataclass(slots=True)
class Space:
    """How large it was."""

    states: int = 0
    runs: int = 0  #: from the beginning, each until a state that was known, or until its end
    ends: int = 0  #: of them
    longest: int = 0  #: actions of a run
    found: Found | None = None


def explore(build: Callable[[Trail], System], *, most: int = 10_000_000) -> Space:
    """Every schedule, or those until something is found.

    Raises
    ------
    AssertionError
        There are more than ``most`` states.
    """
    space, seen, trail = Space(), set[Hashable](), Trail()
    while space.found is None:
        _run(build, trail, seen, space)
        if not trail.turn():
            break
        assert len(seen) <= most, f"more than {most} states: the canonical state holds something that only grows"
    space.states = len(seen)
    return space


def replay(build: Callable[[Trail], System], choices: Sequence[int]) -> Found | None:
    """One schedule again."""
    space = Space()
    _run(build, Trail(choices), set(), space)
    return space.found


def _run(build: Callable[[Trail], System], trail: Trail, seen: set[Hashable], space: Space) -> None:
    system = build(trail)
    schedule: list[Action] = []
    space.runs += 1
    try:
        while True:
            if trail.is_new:
                state = system.state()
                if state in seen:
                    break
                seen.add(state)
            actions = system.enabled()
            if not actions:
                space.ends += 1
                break
            action = actions[trail.choose(len(actions))]
            schedule.append(action)
            action[2](*action[3])
            system.check()
            if system.violations:
                space.found = Found(
                    system.violations[0], tuple(name.format(thing) for name, thing, _, _ in schedule), trail.choices
                )
                break
    finally:
        space.longest = max(space.longest, len(schedule))
        system.leave()
