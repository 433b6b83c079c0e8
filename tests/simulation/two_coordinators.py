"""Two coordinators in a random program, whose nodes wait for each other's. Checks V1, V9, P22 and P27."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiocuda import AsyncCoordinator, Operation
from aiocuda.coordination import Node
from aiocuda.errors import AiocudaError, ClosedError, CycleError, SkippedError
from tests.simulation import internals
from tests.simulation.error_log import PlannedError

if TYPE_CHECKING:
    from tests.simulation.actions import Actions

__all__ = ["TwoCoordinatorActions"]

_ITEMS = 64


class TwoCoordinatorActions:
    """The actions of programs with two coordinators at a time."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions

    def choices(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the actions."""
        return 3 * [self._run]

    async def _run(self) -> None:
        await _Pair(self._actions).run()


class _Pair:
    """Two coordinators, of one device or of two, and the nodes of both in the order of their creation."""

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._checker = actions.checker
        self._random = random.Random(f"aiocuda pair {actions.seed} {actions.counts.get('pair', 0)}")
        self._nodes: list[Node[Any]] = []
        self._prerequisites: dict[Node[Any], list[Node[Any]]] = {}
        self._failing: set[Node[Any]] = set()
        actions.count("pair")

    async def run(self) -> None:
        """Register nodes in both by turns, and leave both; one of them perhaps early."""
        actions, checker, chance = self._actions, self._checker, self._random
        leaves = chance.choice([None, None, None, 0, 1])
        checker.something_abandoned |= leaves is not None
        raised: BaseException | None = None
        try:
            async with contextlib.AsyncExitStack() as opened:
                pair = []
                for _ in range(2):
                    coordinator = AsyncCoordinator(actions.device(), chance.choice([1, 2, 64]))
                    internals.on_accept(coordinator, self._check_submitted)
                    pair.append(await opened.enter_async_context(coordinator))
                for _ in range(4 + chance.randrange(16)):
                    which = chance.randrange(2)
                    if which == leaves and pair[which] is not None and chance.randrange(6) == 0:
                        pair[which]._scheduler.leave()
                        leaves = None
                        break
                    self._register(pair[which])
                    if chance.randrange(4) == 0:
                        self._add_edge(pair)
                    if chance.randrange(6) == 0:
                        await actions.pause()
        except BaseException as error:
            raised = error
            checker.errors.record(error)
            if not isinstance(error, ExceptionGroup | PlannedError | AiocudaError):
                raise
        checker.final_checks.append(self._unfinished)
        self._judge(raised)

    # -- registering ---------------------------------------------------------------------------------------------

    def _register(self, coordinator: AsyncCoordinator) -> None:
        chance = self._random
        after = chance.sample(self._nodes[-6:], min(len(self._nodes), chance.randrange(3)))
        kind = chance.choice(["host", "host", "fails", "upload", "upload", "upload"])
        try:
            if kind == "upload":
                node: Node[Any] = coordinator.upload(np.zeros(_ITEMS, np.uint32), after=after)
            else:
                node = coordinator.host(self._run_host, len(self._nodes), kind == "fails", after=after)
        except ClosedError:
            return  # one of the coordinators, or its device, has been left
        if kind == "fails":
            self._failing.add(node)
        self._nodes.append(node)
        self._prerequisites[node] = after
        self._actions.operation_count += 1

    async def _run_host(self, number: int, fails: bool) -> None:
        node = self._nodes[number]
        for other in self._prerequisites[node]:
            if not other.done():
                self._checker.report(f"V9 {node!r} runs before {other!r} is done")
        if fails:
            raise PlannedError(f"host function {number}")

    def _add_edge(self, pair: Sequence[AsyncCoordinator]) -> None:
        """Add an edge between two of the newest nodes, unless it makes a cycle, or the dependent is submitted."""
        if len(self._nodes) < 2:
            return
        dependent, prerequisite = self._random.sample(self._nodes[-8:], 2)
        is_cycle = self._depends_on(prerequisite, dependent)
        for coordinator in pair:
            try:
                coordinator.add_dependency(dependent, prerequisite)
            except CycleError:
                if not is_cycle:
                    self._checker.report(f"P27 {dependent!r} may not wait for {prerequisite!r}, which is no cycle")
            except (ClosedError, ValueError):
                continue  # submitted; or the dependent is the other coordinator's
            else:
                if is_cycle:
                    self._checker.report(f"P27 {dependent!r} and {prerequisite!r} wait for each other")
                self._prerequisites[dependent].append(prerequisite)
            return

    def _depends_on(self, node: Node[Any], other: Node[Any]) -> bool:
        left, seen = [node], set[Node[Any]]()
        while left:
            here = left.pop()
            if here is other:
                return True
            if here not in seen:
                seen.add(here)
                left.extend(self._prerequisites[here])
        return False

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_submitted(self, node: Node[Any], operation: Operation[Any], too_many: bool) -> None:
        """Check V9 and V12 when a coordinator submits an operation."""
        if too_many:
            self._checker.report(f"V12 the coordinator of {node!r} has more operations in flight than it may have")
        for other in self._prerequisites.get(node, ()):
            if other.operation is not None:
                self._checker.expect_after(operation, [other.operation])

    def _unfinished(self) -> Sequence[str]:
        return [f"V1 {node!r} of a pair of coordinators never ended" for node in self._nodes if not node.done()]

    def _judge(self, raised: BaseException | None) -> None:
        """P22: a node is skipped if a node that it waits for has failed or was withdrawn, and otherwise it runs."""
        checker = self._checker
        if checker.driver.fault is not None or checker.driver.upsets.happened or checker.errors.memory_is_limited:
            return
        for node in self._nodes:
            if not node.done():
                continue  # reported at the end, if it never ends
            error = node.exception()
            if error is not None:
                checker.errors.record(error)
            failed = [other for other in self._prerequisites[node] if other.done() and _has_failed(other)]
            if isinstance(error, SkippedError) and not failed:
                checker.report(f"P22 {node!r} was skipped, and nothing before it has failed")
            if failed and (error is None or node.state == "done"):
                checker.report(f"P22 {node!r} ran, although {failed[0]!r} has failed before it")
            if node in self._failing and error is None:
                checker.report(f"P22 {node!r} has lost its failure")


def _has_failed(node: Node[Any]) -> bool:
    """True if nodes that need this one are skipped. Of an abandoned operation that runs, only the result is dropped."""
    return node.exception() is not None and not (node.state == "abandoned" and node.operation is not None)
