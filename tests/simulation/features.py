"""The parts of the library that only some programs use: each program uses each of them with a chance of 1 in 7."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.barriers_and_groups import BarrierAndGroupActions
from tests.simulation.completions import CompletionActions
from tests.simulation.event_pools import EventPoolActions
from tests.simulation.foreign_memory import ForeignMemoryActions
from tests.simulation.freed_streams import FreedStreamActions
from tests.simulation.given_groups import GivenGroupActions
from tests.simulation.graphs import run_graph
from tests.simulation.memory_adaptors import MemoryAdaptorActions
from tests.simulation.stream_pools import StreamPoolActions
from tests.simulation.submissions import SubmissionActions
from tests.simulation.tickets import TicketActions
from tests.simulation.triple_buffers import TripleBufferActions
from tests.simulation.two_coordinators import TwoCoordinatorActions

if TYPE_CHECKING:
    from tests.simulation.actions import Actions

__all__ = ["feature_actions", "features_of"]

#: The actions of each feature. A task of such a program chooses among these and the actions that all programs have.
_ACTIONS: dict[str, Callable[[Actions], Sequence[Callable[[], Awaitable[None]]]]] = {
    "coordinator": lambda actions: 3 * [partial(run_graph, actions)],
    "leases": lambda actions: StreamPoolActions(actions).choices(),
    "loans": lambda actions: EventPoolActions(actions).choices(),
    "meetings": lambda actions: BarrierAndGroupActions(actions).choices(),
    "adapted": lambda actions: MemoryAdaptorActions(actions).choices(),
    "foreign": lambda actions: ForeignMemoryActions(actions).choices(),
    "submissions": lambda actions: SubmissionActions(actions).choices(),
    "pairs": lambda actions: TwoCoordinatorActions(actions).choices(),
    "triple buffers": lambda actions: TripleBufferActions(actions).choices(),
    "given": lambda actions: GivenGroupActions(actions).choices(),
    "freed": lambda actions: FreedStreamActions(actions).choices(),
    "loans by kind": lambda actions: EventPoolActions(actions, by_kind=True).choices(),
    "completions": lambda actions: CompletionActions(actions).choices(),
    "tickets": lambda actions: TicketActions(actions).choices(),
}

_ONE_IN = 7


def features_of(seed: int) -> list[str]:
    """Return the names of the features that a program uses. One program in nine uses none."""
    chance = random.Random(f"aiocuda kinds {seed}")
    return [feature for feature in _ACTIONS if chance.random() < 1 / _ONE_IN]


def feature_actions(seed: int, actions: Actions) -> list[Callable[[], Awaitable[None]]]:
    """Return the actions of the features of a program, and count the features."""
    choices: list[Callable[[], Awaitable[None]]] = []
    for feature in features_of(seed):
        actions.count(feature)
        choices += _ACTIONS[feature](actions)
    return choices
