"""What some of the random programs use beside streams: each for a part of the seeds, by a chance of its own."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .adapted import Adapted
from .coordinate import coordinate
from .foreign import Foreign
from .leases import Leases
from .loans import Loans
from .meetings import Meetings

if TYPE_CHECKING:
    from .actions import Actions

__all__ = ["actions_of", "kinds_of"]

#: What a task of such a program does now and then, beside the 34 actions that all have.
_DO: dict[str, Callable[[Actions], Sequence[Callable[[], Awaitable[None]]]]] = {
    "coordinator": lambda actions: 3 * [partial(coordinate, actions)],
    "leases": lambda actions: Leases(actions).doing(),
    "loans": lambda actions: Loans(actions).doing(),
    "meetings": lambda actions: Meetings(actions).doing(),
    "adapted": lambda actions: Adapted(actions).doing(),
    "foreign": lambda actions: Foreign(actions).doing(),
}

#: One in so many is of each kind; one may be of several.
_ONE_IN = 7


def kinds_of(seed: int) -> list[str]:
    """Of what kinds a program is; half of them are of none."""
    chance = random.Random(f"aiocuda kinds {seed}")
    return [kind for kind in _DO if chance.random() < 1 / _ONE_IN]


def actions_of(seed: int, actions: Actions) -> list[Callable[[], Awaitable[None]]]:
    """What its tasks may do beside what all do."""
    found: list[Callable[[], Awaitable[None]]] = []
    for kind in kinds_of(seed):
        actions.count(kind)
        found += _DO[kind](actions)
    return found
