"""`aiocuda.as_completed` in a random program: over operations, events and gatherings of all streams and devices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiocuda import Operation, as_completed, gather
from tests.simulation import internals

if TYPE_CHECKING:
    from tests.simulation.actions import Actions

__all__ = ["CompletionActions"]


class CompletionActions:
    """Iterations that end, are left early, or time out. Checks V1 and V3."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions that a task chooses from."""
        return 3 * [self.iterate]

    async def iterate(self) -> None:
        """Iterate over some things, and wait for some of those that are yielded."""
        actions = self._actions
        actions.count("completions")
        things = self._things()
        # As the loop has seen them: a query of a later operation ends earlier ones, too.
        ended = ("done", "failed", "abandoned")
        unfinished = {each for each in things if isinstance(each, Operation) and each.seen_state not in ended}
        left = dict.fromkeys(things)
        limit = actions.seconds(4) if actions.below(4) == 0 else None
        stops = actions.below(4) == 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit), contextlib.aclosing(as_completed(things)) as completed:
                async for thing in completed:
                    self._check(thing, left, unfinished)
                    if stops and actions.below(3) == 0:
                        return
                    if actions.below(3) == 0:
                        await thing
                    elif actions.below(3) == 0:
                        await actions.pause()
                for thing in left:
                    self._checker.report(f"V1 as_completed has never yielded {thing!r}")

    def _things(self) -> list[Any]:
        actions = self._actions
        things: dict[Any, None] = dict.fromkeys(each for each in actions.operations[-12:] if actions.below(3) == 0)
        for _ in range(actions.below(5)):
            things[actions.follow(actions.stream().synchronize())] = None
        for _ in range(actions.below(3)):
            operations = [actions.follow(actions.stream().synchronize()) for _ in range(actions.below(4))]
            things[gather(*operations, return_exceptions=bool(actions.below(2)))] = None
        if actions.below(2):
            event = actions.stream().record()
            actions.follow(event.operation)
            things[event] = None
        found = list(things)
        return found[::-1] if actions.below(2) else found

    def _check(self, thing: Any, left: dict[Any, None], unfinished: set[Any]) -> None:
        if thing not in left:
            self._checker.report(f"V1 as_completed has yielded {thing!r} again")
        left.pop(thing, None)
        if not thing.done():
            self._checker.report(f"V1 as_completed has yielded {thing!r} before its end")
        if isinstance(thing, Operation) and thing in unfinished and thing.state == "done":
            for other in left:
                if (
                    isinstance(other, Operation)
                    and other in unfinished
                    and other.id < thing.id
                    and internals.queue_of(other) is internals.queue_of(thing)
                ):
                    self._checker.report(f"V3 as_completed has yielded {thing!r} before {other!r}")
