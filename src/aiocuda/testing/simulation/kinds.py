"""What some of the random programs use beside streams: each for a part of the seeds, by a chance of its own."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .coordinate import coordinate

if TYPE_CHECKING:
    from .actions import Actions

__all__ = ["actions_of", "kinds_of"]

#: By kind: what such a program does now and then, and how often beside the 34 actions that all of them have.
_DO: dict[str, list[tuple[int, Callable[..., Awaitable[None]]]]] = {
    "coordinator": [(3, coordinate)],
}

#: One in so many is of each kind; one may be of several.
_ONE_IN = 7


def kinds_of(seed: int) -> list[str]:
    """Of what kinds a program is; most are of none."""
    chance = random.Random(f"aiocuda kinds {seed}")
    return [kind for kind in _DO if chance.random() < 1 / _ONE_IN]


def actions_of(seed: int, actions: Actions) -> list[Callable[[], Awaitable[None]]]:
    """What its tasks may do beside what all do."""
    found: list[Any] = []
    for kind in kinds_of(seed):
        actions.count(kind)
        for often, do in _DO[kind]:
            found += often * [partial(do, actions)]
    return found
