"""Coordinators in a random program: graphs with failures, abandoned nodes and cancelled waiters. Checks V9 and P22."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiocuda import AsyncCoordinator, Device, Operation
from aiocuda.coordination import Bracket, Node
from aiocuda.coordination._node import PRIORITIES
from aiocuda.errors import AiocudaError, BusyError, ClosedError, CycleError, DeadlockError, SkippedError
from tests.simulation import internals
from tests.simulation.error_log import PlannedError
from tests.simulation.kernels import AFFINE, BLEND
from tests.simulation.oracle import CELL, CELLS, ExpectedNode, Oracle, Part

if TYPE_CHECKING:
    from tests.simulation.actions import Actions

__all__ = ["run_graph"]

#: The kinds of operations; a kind that comes more often is listed more often.
_KINDS: Final = ["upload", *3 * ["bump"], *3 * ["blend"], *2 * ["download"], *2 * ["bracket"], "host", "fresh"]
_PRIORITIES: Final = ["critical", "high", "normal", "normal", "low", "cleanup"]


async def run_graph(actions: Actions) -> None:
    """Open a coordinator, run a random graph on it and close it, in half of all calls."""
    if actions.below(2):
        await _RandomGraph(actions).run()


class _RandomGraph:
    """One coordinator and one graph.

    The methods that are named after a kind register one operation of that kind, both with the coordinator and with the
    oracle. `_disturb` and what it calls act on operations that are registered: they wait, abandon, and add edges.
    """

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        #: Decides about what was added to these graphs later. Drawn from `actions`, it would change most programs.
        self._random = random.Random(f"aiocuda graph {actions.seed} {actions.counts.get('graph', 0)}")
        #: Decides about priorities that change, and about blocks that are entered late or never, for the same reason.
        self._late_random = random.Random(f"aiocuda graph priorities {actions.seed} {actions.counts.get('graph', 0)}")
        self._checker = actions.checker
        self._device: Device = actions.device()
        self._coordinator = AsyncCoordinator(
            self._device, actions.choose([1, 2, 4, 64]), streams=actions.choose([1, 2, 4])
        )
        self._buffers: list[Any] = []
        self._oracle = Oracle(0)
        self._nodes: dict[Node[Any], ExpectedNode] = {}
        self._tasks: list[asyncio.Task[None]] = []
        #: Blocks that no task has entered, and the functions that run them.
        self._unentered: list[tuple[ExpectedNode, Bracket, Callable[[Bracket], Coroutine[Any, Any, None]]]] = []
        self._callbacks_added: list[Node[Any]] = []
        self._callbacks_called: list[Node[Any]] = []
        self._polled: dict[Node[Any], int] = {}
        self._polled_since: int | None = None  # the number of nodes that were registered before the first poll
        internals.on_accept(self._coordinator, self._check_submitted)

    async def run(self) -> None:
        """Run the graph, and let the oracle judge it."""
        actions, checker = self._actions, self._checker
        stream = actions.stream(self._device)
        self._buffers = [stream.empty(CELLS * CELL, np.uint32) for _ in range(1 + actions.below(3))]
        self._oracle = Oracle(len(self._buffers))
        actions.count("graph")
        leaves_early = actions.below(8) == 0
        raised: BaseException | None = None
        checker.final_checks.append(self._check_end)
        try:
            async with self._coordinator:
                for buffer in range(len(self._buffers)):
                    self._upload((buffer, 0, CELLS))
                for _ in range(2 + actions.below(14)):
                    await self._disturb_or_register()
                if leaves_early:
                    raise PlannedError("the program leaves the coordinator")
        except BaseException as error:
            checker.something_abandoned = True  # the coordinator abandons its nodes
            raised = error
            if not isinstance(error, PlannedError | ExceptionGroup):
                raise
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        for expected, _, _ in self._unentered:  # the coordinator has withdrawn them
            expected.withdrawn = expected.abandoned = True
        self._unentered.clear()
        self._poll()
        if not leaves_early and checker.driver.fault is None:
            self._check_polled()
            upset = checker.errors.memory_is_limited or bool(checker.driver.upsets.happened)
            for text in (*self._oracle.judge(upset), *self._check_raised(raised, upset)):
                checker.report(text)
        self._raise_others(raised)

    async def _disturb_or_register(self) -> None:
        actions = self._actions
        late = self._random.randrange(6)
        if late < 2:
            await self._await_here()
        elif late == 2:
            self._relay()
        if self._late_random.randrange(3) == 0:
            self._change_priority()
        if self._unentered and self._late_random.randrange(3) == 0:
            await self._enter_or_drop()
        choice = actions.below(16)
        if choice == 0:
            await actions.pause()
        elif choice == 1:
            self._abandon()
        elif choice == 2:
            self._await_in_task()
        elif choice == 3:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(actions.seconds(4)):
                    await (self._coordinator.drain() if actions.below(2) else self._coordinator.room())
        elif choice == 4:
            self._add_edge()
        elif choice == 5:
            self._poll()
        else:
            entered = getattr(self, f"_{actions.choose(_KINDS)}")(self._part())
            if entered is not None:
                await entered

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_submitted(self, node: Node[Any], operation: Operation[Any], too_many: bool) -> None:
        """Check V9 and V12 when the coordinator submits an operation."""
        expected = self._nodes.get(node)
        if expected is not None:
            expected.submitted = operation
            self._checker.expect_after(operation, self._earlier(expected))
        if too_many:
            self._checker.report(f"V12 {self._coordinator!r} has more operations in flight than it may have")
        if expected is not None and expected.kind != "bracket":  # a bracket has got its place before its block began
            rank = PRIORITIES.index(node.priority)
            for other in internals.nodes_that_wait_for_a_place(self._coordinator):
                if PRIORITIES.index(other.priority) < rank:
                    self._checker.report(f"V12 {node!r} got a place before {other!r}, which has a higher priority")

    def _earlier(self, node: ExpectedNode) -> Iterator[Operation[Any]]:
        """Yield the operations that a node comes after. All its dependencies must already be submitted."""
        for other in node.dependencies:
            if not other.may_be_followed:
                self._checker.report(f"V9 {node!r} was submitted before {other!r}, on which it depends")
            yield from other.last_operations()

    def _check_end(self) -> Iterator[str]:
        for node in self._nodes:
            if not node.done():
                yield f"V1 {node!r} of a coordinator never ended"
        for node in self._callbacks_added:
            called = self._callbacks_called.count(node)
            if node.done() and called != self._callbacks_added.count(node):
                yield f"V1 {node!r} of a coordinator called {called} callbacks"

    def _check_raised(self, raised: BaseException | None, upset: bool) -> Iterator[str]:
        """P22: the coordinator raises all failures that no caller has seen, and nothing else."""
        if upset:
            return
        for error in _leaves(raised):
            if not isinstance(error, PlannedError | ClosedError):
                yield f"P22 {self._coordinator!r} raised {error!r}, and nothing has failed with that"
        for node in self._oracle.nodes:
            if node.node is not None and internals.root_failure_is_unseen(node.node):
                yield f"P22 the failure of {node!r} was raised nowhere"

    def _raise_others(self, raised: BaseException | None) -> None:
        """Raise the first error that this graph has not planned. Whether it is expected is decided by the program."""
        errors = [error for error in _leaves(raised) if not isinstance(error, PlannedError)]
        errors += [error for task in self._tasks if not task.cancelled() and (error := task.exception()) is not None]
        for error in errors:
            self._checker.errors.record(error)
        if errors:
            raise errors[0]

    def _poll(self) -> None:
        """Note what the coordinator returns as finished."""
        if self._polled_since is None:
            self._polled_since = len(self._oracle.nodes)
        for node in map(internals.scheduled, self._coordinator.poll()):
            self._polled[node] = self._polled.get(node, 0) + 1

    def _check_polled(self) -> None:
        """V1: each node that was registered after the first poll was returned once."""
        for node, count in self._polled.items():
            if count > 1 or not node.done():
                self._checker.report(f"V1 {node!r} was polled {count} times")
        for expected in self._oracle.nodes[self._polled_since :]:
            if expected.node is not None and expected.node.done() and expected.node not in self._polled:
                self._checker.report(f"V1 {expected!r} has ended and was never polled")

    # -- waiting, abandoning, adding edges -----------------------------------------------------------------------

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(coroutine))

    def _newest(self) -> list[ExpectedNode]:
        return [node for node in self._oracle.nodes[-8:] if not node.is_outside]

    def _abandon(self) -> None:
        nodes = self._newest()
        if not nodes:
            return
        node = self._actions.choose(nodes)
        was_submitted = node.submitted is not None
        if node.is_relayed and was_submitted:
            return  # the array stays in use for a while, and its upload would be refused
        assert node.node is not None
        if node.node.abandon():
            self._checker.something_abandoned = True
            self._actions.count("withdraw")
            node.withdrawn = not was_submitted
            node.abandoned = True

    def _change_priority(self) -> None:
        """Give another priority to one of the newest nodes, if it still waits."""
        nodes = [node.node for node in self._newest() if node.node is not None]
        if nodes:
            with contextlib.suppress(BusyError):
                self._late_random.choice(nodes).priority = self._late_random.choice(PRIORITIES)

    def _await_in_task(self) -> None:
        nodes = self._newest()
        if nodes:
            self._start_task(self._await_for_a_while(self._actions.choose(nodes)))

    async def _await_for_a_while(self, node: ExpectedNode) -> None:
        await self._await(node, self._actions.seconds(4) if self._actions.below(2) else None)

    async def _await_here(self) -> None:
        """Await a node in the task that registers the graph."""
        nodes = self._newest()
        if nodes:
            await self._await(self._random.choice(nodes), 0.01)

    async def _await(self, expected: ExpectedNode, seconds: float | None) -> None:
        node = expected.node
        assert node is not None
        try:
            async with asyncio.timeout(seconds):
                await node
        except TimeoutError:
            return
        except DeadlockError as error:
            self._checker.report(f"V1 {error}: and there is no deadlock")
        except (PlannedError, SkippedError, ClosedError) as error:
            self._checker.errors.record(error)
        except AiocudaError as error:
            self._checker.errors.record(error)
            if self._checker.driver.fault is None and not node.done():
                raise
        if not node.done() and self._checker.driver.fault is None:
            self._checker.report(f"V1 {node!r} woke its waiter before it was done")

    def _add_edge(self) -> None:
        """Let one node depend on another, unless it is submitted already or that makes a cycle."""
        nodes = self._newest()
        if len(nodes) < 2:
            return
        node, other = self._actions.choose(nodes), self._actions.choose(nodes)
        assert node.node is not None
        assert other.node is not None
        is_cycle = node is other or self._oracle.depends_on(other, node)
        try:
            self._coordinator.add_dependency(node.node, other.node)
        except ClosedError:
            return  # already submitted
        except CycleError:
            if not is_cycle:
                self._checker.report(f"P27 {node!r} may not depend on {other!r}, and that would be no cycle")
            return
        if is_cycle:
            self._checker.report(f"P27 {node!r} and {other!r} depend on each other")
        node.dependencies[other] = True

    # -- registering operations ----------------------------------------------------------------------------------

    def _part(self) -> Part:
        actions = self._actions
        buffer = actions.below(len(self._buffers))
        if actions.below(2):
            return buffer, 0, CELLS
        first = actions.below(CELLS)
        return buffer, first, first + 1 + actions.below(CELLS - first)

    def _slice(self, part: Part) -> Any:
        buffer, first, last = part
        return self._buffers[buffer][first * CELL : last * CELL]

    def _options(self) -> tuple[dict[str, Any], list[ExpectedNode]]:
        """Return ``after=`` and ``priority=``, and the nodes that ``after`` names."""
        actions = self._actions
        after = [actions.choose(self._oracle.nodes)] if self._oracle.nodes and actions.below(4) == 0 else []
        named: list[Any] = [node.submitted if node.node is None else internals.for_program(node.node) for node in after]
        if actions.operations and actions.below(8) == 0:
            operation = actions.choose(actions.operations[-12:])
            outside = ExpectedNode("outside", None, (), (), 0)
            outside.submitted = operation
            self._oracle.add(outside, ())
            after.append(outside)
            named.append(operation)
        return {"after": named, "priority": actions.choose(_PRIORITIES)}, after

    def _register(
        self,
        kind: str,
        node: Node[Any],
        reads: Sequence[Part],
        writes: Sequence[Part],
        value: int,
        after: list[ExpectedNode],
    ) -> ExpectedNode:
        expected = ExpectedNode(kind, node, reads, writes, value)
        self._oracle.add(expected, after)
        self._nodes[node] = expected
        self._actions.operation_count += 1
        operation = node.operation
        if operation is not None:  # it was submitted immediately
            expected.submitted = operation
            self._checker.expect_after(operation, self._earlier(expected))
        if self._actions.below(3) == 0:
            self._callbacks_added.append(node)
            node.add_done_callback(lambda node: self._callbacks_called.append(internals.scheduled(node)))
        return expected

    def _upload(self, part: Part) -> None:
        value = self._actions.below(1 << 16)
        options, after = self._options()
        array = np.full((part[2] - part[1]) * CELL, value, np.uint32)
        node = self._coordinator.upload(array, self._slice(part), **options)
        self._register("upload", node, (), (part,), value, after)

    def _bump(self, part: Part) -> None:
        """Run a kernel that reads and writes one buffer, sometimes in a stream of the program."""
        term = self._actions.below(1000)
        options, after = self._options()
        shares = self._actions.below(12) == 0
        if shares:
            options["stream"] = self._actions.stream(self._device)
        target = self._slice(part)
        node = self._coordinator.compute(AFFINE, 1, 32, target, target.size, 5, term, **options)
        self._register("bump", node, (part,), (part,), term, after).shares = shares

    def _blend(self, part: Part) -> None:
        """Run a kernel that reads one buffer and writes another, with or without ``reads=`` and ``writes=``."""
        term = self._actions.below(1000)
        options, after = self._options()
        buffer, first, last = part
        source = (buffer + 1) % len(self._buffers), first, last
        if source[0] == buffer:
            self._bump(part)
            return
        target, operand = self._slice(part), self._slice(source)
        reads: tuple[Part, ...] = (source,)
        declared = self._random.randrange(5)
        if declared == 0:  # nothing: the coordinator assumes that the kernel also reads its target
            reads = (source, part)
        elif declared == 1:
            options |= {"reads": [operand], "writes": [target]}
        else:
            options["writes"] = [target]
        node = self._coordinator.compute(BLEND, 1, 32, target, operand, term, target.size, **options)
        self._register("blend", node, reads, (part,), term, after)

    def _download(self, part: Part) -> None:
        options, after = self._options()
        node = self._coordinator.download(self._slice(part), **options)
        self._keep_result(self._register("download", node, (part,), (), 0, after), node)

    @staticmethod
    def _keep_result(expected: ExpectedNode, node: Node[Any]) -> None:
        def keep(node: Node[Any]) -> None:
            if node.state == "done":
                expected.result = node.result()

        node.add_done_callback(keep)

    def _relay(self) -> None:
        """Download a part into an array and upload the array to another buffer, without a wait in between."""
        buffer = self._random.randrange(len(self._buffers))
        first = self._random.randrange(CELLS)
        last = self._random.randint(first + 1, CELLS)
        source = buffer, first, last
        target = (buffer + 1) % len(self._buffers), first, last
        array = np.empty((last - first) * CELL, np.uint32)
        node = self._coordinator.download(self._slice(source), out=array)
        download = self._register("download", node, (source,), (), 0, [])
        self._keep_result(download, node)
        download.is_relayed = True
        upload = self._coordinator.upload(array, self._slice(target))
        self._register("relay", upload, (), (target,), 0, [download]).upload_of = download

    def _fresh(self, part: Part) -> None:
        """Upload to a new buffer, which only its node names, and download it."""
        value = self._actions.below(1 << 16)
        options, after = self._options()
        upload = self._coordinator.upload(np.full(CELL, value, np.uint32), **options)
        expected = self._register("upload", upload, (), (), value, after)
        options, after = self._options()
        download = self._coordinator.download(upload, **options)
        self._register("download", download, (), (), 0, [*after, expected])

        def check(node: Node[Any]) -> None:
            if node.state == "done" and not (node.result() == value).all():
                self._checker.report(f"V2 {node!r} has other bytes than {upload!r} wrote")

        download.add_done_callback(check)

    def _host(self, part: Part) -> None:
        """Run a host function, which checks that its dependencies are done, and may fail."""
        options, after = self._options()
        fails = self._actions.below(4) == 0
        registered: list[ExpectedNode] = []

        def function() -> None:
            for expected in registered:
                for other in expected.dependencies:
                    if other.node is not None and not other.node.done():
                        self._checker.report(f"V9 {expected!r} ran before {other!r} was done")
            if fails:
                registered[0].raised = True
                raise PlannedError("a host function fails")

        async def coroutine_function() -> None:
            function()
            await self._actions.pause()

        chosen = coroutine_function if self._actions.below(2) else function
        node = self._coordinator.host(chosen, reads=[self._slice(part)], **options)
        registered.append(self._register("host", node, (part,), (), 0, after))

    async def _bracket(self, part: Part) -> None:
        """Enqueue work of the program's own in a block, in another task; sometimes later, or never."""
        value = self._actions.below(1 << 16)
        options, after = self._options()
        target = self._slice(part)
        bracket = self._coordinator.operation("kernel", writes=[target], **options)
        expected = self._register("bracket", internals.scheduled(bracket), (), (part,), value, after)
        if self._late_random.randrange(3) == 0:
            self._unentered.append((expected, bracket, partial(self._run_block, expected=expected, target=target)))
            return
        self._start_task(self._run_block(bracket, expected, target))
        await asyncio.sleep(0)

    async def _enter_or_drop(self) -> None:
        """Enter a block that was created before, or drop it: then it must end, also without a task that waits."""
        expected, bracket, run_block = self._unentered.pop(self._late_random.randrange(len(self._unentered)))
        if self._late_random.randrange(2):
            self._start_task(run_block(bracket))
            del bracket
            await asyncio.sleep(0)
            return
        expected.withdrawn = expected.abandoned = True
        self._checker.something_abandoned = True
        self._actions.count("drop block")
        del bracket
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if expected.node is not None and not expected.node.done():
            self._checker.report(f"V1 {expected!r} was dropped and has not ended")

    async def _run_block(self, bracket: Bracket, expected: ExpectedNode, target: Any) -> None:
        actions = self._actions
        raises, pauses = actions.below(3) == 0, actions.below(2)
        try:
            async with bracket:
                if not raises or actions.below(2):
                    assert bracket.stream is not None
                    self._checker.expect_after(bracket.stream.fill(target, expected.value), self._earlier(expected))
                if pauses:
                    await actions.pause()
                if raises:
                    expected.raised = True
                    raise PlannedError("a block raises")
        except (PlannedError, SkippedError, ClosedError) as error:
            self._checker.errors.record(error)
        except asyncio.CancelledError:
            expected.cancelled = True
            raise


def _leaves(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors of nested groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    elif error is not None:
        yield error
