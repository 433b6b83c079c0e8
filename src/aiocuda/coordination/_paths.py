"""Paths: how one thing comes behind another, over others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["path_between"]

T = TypeVar("T")

#: For each thing that was found, the one that it was found from.
_Found = dict[T, T | None]


def path_between(
    start: T, end: T, before: Callable[[T], Iterable[T]], behind: Callable[[T], Iterable[T]]
) -> list[T] | None:
    """How ``start`` comes behind ``end``, from edge to edge; None if it does not.

    The search goes from both ends, an edge at a time, and ends with the smaller side. So a new edge between two parts
    costs no more than the smaller part: a chain of n edges costs n steps from either end, and n log n in any order.

    Parameters
    ----------
    before
        What something comes directly behind.
    behind
        What comes directly behind something.
    """
    if start is end:
        return [start]
    downwards: _Found[T] = {start: None}
    upwards: _Found[T] = {end: None}
    mine, others = (_walk(start, before, downwards), upwards), (_walk(end, behind, upwards), downwards)
    while True:
        walk, theirs = mine
        try:
            met = next(walk)
        except StopIteration:
            return None
        if met in theirs:
            return [*_trail(met, downwards)[::-1], *_trail(met, upwards)[1:]]
        mine, others = others, mine


def _walk(first: T, neighbours: Callable[[T], Iterable[T]], found: _Found[T]) -> Iterator[T]:
    """All that can be reached, by one edge after the other."""
    left = [first]
    while left:
        here = left.pop()
        for other in neighbours(here):
            if other not in found:
                found[other] = here
                left.append(other)
            yield other


def _trail(here: T, found: _Found[T]) -> list[T]:
    trail = [here]
    while (before := found[trail[-1]]) is not None:
        trail.append(before)
    return trail
