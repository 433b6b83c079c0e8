"""Disturbed: what tasks do to operations of a random graph: they wait, withdraw, and add edges."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ... import AsyncCoordinator
from ...errors import AiocudaError, ClosedError, CycleError, DeadlockError, SkippedError
from .heard import PlannedError
from .oracle import Oracle, Step

if TYPE_CHECKING:
    from .actions import Actions
    from .check import Checker

__all__ = ["Disturbed"]


class Disturbed:
    """A graph whose newest operations are waited for, withdrawn and linked."""

    _actions: Actions
    _chance: random.Random
    _checker: Checker
    _coordinator: AsyncCoordinator
    _oracle: Oracle
    _tasks: list[asyncio.Task[None]]

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(coroutine))

    def _nodes(self) -> list[Step]:
        return [step for step in self._oracle.steps[-8:] if step.node is not None]

    def _abandon(self) -> None:
        steps = self._nodes()
        if not steps:
            return
        step = self._actions._one(steps)
        given = step.given is not None
        if step.is_relayed and given:
            return  # its array stays busy for a while, and the upload of it would be refused
        if step.node.abandon():
            self._checker.dropped = True
            self._actions.count("withdraw")
            step.withdrawn = not given
            step.dropped = True

    def _wait(self) -> None:
        steps = self._nodes()
        if steps:
            self._begin(self._told(self._actions._one(steps)))

    async def _see(self) -> None:
        """The task that goes on registering is told what became of an operation."""
        steps = self._nodes()
        if steps:
            await self._await(self._chance.choice(steps), 0.01)

    async def _told(self, step: Step) -> None:
        """Another task awaits it, for a while."""
        await self._await(step, self._actions._seconds(4) if self._actions.below(2) else None)

    async def _await(self, step: Step, seconds: float | None) -> None:
        node = step.node
        assert node is not None
        try:
            async with asyncio.timeout(seconds):
                await node
        except TimeoutError:
            return
        except DeadlockError as error:
            self._checker.found(f"V1 {error}: and it would have ended")
        except (PlannedError, SkippedError, ClosedError) as error:
            self._checker.heard.error(error)
        except AiocudaError as error:
            self._checker.heard.error(error)
            if self._checker.driver.fault is None and not node.done():
                raise
        if not node.done() and self._checker.driver.fault is None:
            self._checker.found(f"V1 {node!r} woke its waiter before it was done")

    def _link(self) -> None:
        """An edge that comes later, to something that waits yet."""
        steps = self._nodes()
        if len(steps) < 2:
            return
        one, other = self._actions._one(steps), self._actions._one(steps)
        cyclic = one is other or self._oracle.is_behind(other, one)
        try:
            self._coordinator.add_dependency(one.node, other.node)
        except ClosedError:
            return  # it was given to a stream
        except CycleError:
            if not cyclic:
                self._checker.found(f"P27 {one!r} cannot come behind {other!r}, which does not come behind it")
            return
        if cyclic:
            self._checker.found(f"P27 {one!r} and {other!r} wait for each other")
        one.behind[other] = True
