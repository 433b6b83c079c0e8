"""A coordinator of a random program: a graph with failures, withdrawals and cancelled waiters, and V9 looked at."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import AsyncCoordinator
from ..._device import Device
from ...completion._operation import Operation
from ...coordination import Bracket, Node
from ...coordination._scheduled_node import ScheduledNode
from ...errors import ClosedError, SkippedError
from .disturbed import Disturbed
from .heard import PlannedError
from .kernels import AFFINE, BLEND
from .oracle import CELL, CELLS, Oracle, Part, Step

if TYPE_CHECKING:
    from .actions import Actions

__all__ = ["coordinate"]

#: How often each kind of operation comes.
_KINDS = ["upload", *3 * ["bump"], *3 * ["blend"], *2 * ["download"], *2 * ["bracket"], "host", "fresh"]
_PRIORITIES = ["critical", "high", "normal", "normal", "low", "cleanup"]


async def coordinate(actions: Actions) -> None:
    """One coordinator, from its first operation to its end, one way or another."""
    if actions.below(2):
        await _Graph(actions).run()


class _Graph(Disturbed):
    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        #: Decides what came later than most programs, so that these stay what they are.
        self._chance = random.Random(f"aiocuda graph {actions.seed} {actions.done.get('graph', 0)}")
        self._checker = actions._checker
        self._device: Device = actions._device()
        self._coordinator = AsyncCoordinator(self._device, actions._one([1, 2, 4, 64]), streams=actions._one([1, 2, 4]))
        self._buffers: list[Any] = []
        self._oracle = Oracle(0)
        self._steps: dict[Node[Any], Step] = {}
        self._outside: list[Step] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._called: list[Node[Any]] = []  # back
        self._calls: list[Node[Any]] = []  # that are to come
        self._hooked()

    # -- what is looked at ---------------------------------------------------------------------------------------

    def _hooked(self) -> None:
        """Hear of everything that a stream is given."""
        scheduler = self._coordinator._scheduler
        accept = scheduler.accept

        def accepted(node: ScheduledNode[Any], queue: Any, operation: Operation[Any]) -> None:
            step = self._steps.get(node)
            if step is not None:
                step.given = operation
                self._checker.behind(operation, self._before(step))
            if scheduler.in_flight > scheduler.max_in_flight:
                self._checker.found(f"V12 {self._coordinator!r} has given more than that to streams")
            accept(node, queue, operation)

        scheduler.accept = accepted  # type: ignore[method-assign]

    def _before(self, step: Step) -> Iterator[Operation[Any]]:
        """All that it comes behind is in streams by now."""
        for other in step.behind:
            if not other.stands:
                self._checker.found(f"V9 {step!r} was given to a stream before {other!r}, which it comes behind")
            yield from other.marks()

    def _ended(self) -> Iterator[str]:
        unentered = self._coordinator._scheduler.unentered  # brackets
        for node in self._steps:
            if not node.done() and node not in unentered:
                yield f"V1 {node!r} of a coordinator never ended"
        for node in self._calls:
            if node.done() and self._called.count(node) != self._calls.count(node):
                yield f"V1 {node!r} of a coordinator told {self._called.count(node)} callbacks"

    # -- a graph -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        actions, checker = self._actions, self._checker
        stream = actions._stream(self._device)
        self._buffers = [stream.empty(CELLS * CELL, np.uint32) for _ in range(1 + actions.below(3))]
        self._oracle = Oracle(len(self._buffers))
        actions.count("graph")
        leaves = actions.below(8) == 0
        told: BaseException | None = None
        checker.at_end.append(self._ended)
        try:
            async with self._coordinator:
                for buffer in range(len(self._buffers)):
                    self._upload((buffer, 0, CELLS))
                for _ in range(2 + actions.below(14)):
                    await self._any()
                if leaves:
                    raise PlannedError("it is left")
        except BaseException as error:
            checker.dropped = True  # what no stream has, and of what one has the results
            told = error
            if not isinstance(error, PlannedError | ExceptionGroup):
                raise
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        if not leaves and checker.driver.fault is None:
            upset = checker.heard.scarce or bool(checker.driver.upsets.happened)
            for text in (*self._oracle.judge(upset), *self._raised(told, upset)):
                checker.found(text)
        self._raise_others(told)

    def _raised(self, told: BaseException | None, upset: bool) -> Iterator[str]:
        """P22: what nobody was told of is raised at the end, all of it, and nothing else."""
        if upset:
            return
        found = list(_leaves(told))
        for error in found:
            if not isinstance(error, PlannedError | ClosedError):
                yield f"P22 {self._coordinator!r} raised {error!r}, and nothing of the kind has failed"
        for step in self._oracle.steps:
            cause = step.node.root_failure if isinstance(step.node, ScheduledNode) else None
            if cause is not None and not cause.delivered:
                yield f"P22 nobody was told what {step!r} failed with"

    def _raise_others(self, told: BaseException | None) -> None:
        """What was not planned here, and was not to go wrong, is for others to judge."""
        errors = [error for error in _leaves(told) if not isinstance(error, PlannedError)]
        errors += [error for task in self._tasks if not task.cancelled() and (error := task.exception()) is not None]
        for error in errors:
            self._checker.heard.error(error)
        if errors:
            raise errors[0]

    async def _any(self) -> None:
        actions = self._actions
        later = self._chance.randrange(6)
        if later < 2:
            await self._see()
        elif later == 2:
            self._relay()
        what = actions.below(16)
        if what == 0:
            await actions._pause()
        elif what == 1:
            self._abandon()
        elif what == 2:
            self._wait()
        elif what == 3:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(actions._seconds(4)):
                    await (self._coordinator.drain() if actions.below(2) else self._coordinator.room())
        elif what == 4:
            self._link()
        elif what == 5:
            self._coordinator.poll()
        else:
            made = getattr(self, f"_{actions._one(_KINDS)}")(self._part())
            if made is not None:
                await made  # a block is registered when it is entered

    def _part(self) -> Part:
        actions = self._actions
        buffer = actions.below(len(self._buffers))
        if actions.below(2):
            return buffer, 0, CELLS
        first = actions.below(CELLS)
        return buffer, first, first + 1 + actions.below(CELLS - first)

    def _of(self, part: Part) -> Any:
        buffer, first, last = part
        return self._buffers[buffer][first * CELL : last * CELL]

    def _options(self) -> tuple[dict[str, Any], list[Step]]:
        """What it comes behind beside what is inferred; and where, and when."""
        actions = self._actions
        after = [actions._one(self._oracle.steps)] if self._oracle.steps and actions.below(4) == 0 else []
        named: list[Any] = [step.given if step.outside else step.node for step in after]
        if actions._operations and actions.below(8) == 0:
            operation = actions._one(actions._operations[-12:])
            step = Step("outside", None, (), (), 0)
            step.given, step.outside = operation, True
            self._oracle.add(step, ())
            after.append(step)
            named.append(operation)
        return {"after": named, "priority": actions._one(_PRIORITIES)}, after

    def _registered(self, kind: str, node: Node[Any], reads: Any, writes: Any, value: int, after: list[Step]) -> Step:
        step = Step(kind, node, reads, writes, value)
        self._note(step, after)
        return step

    def _note(self, step: Step, after: list[Step]) -> None:
        self._oracle.add(step, after)
        node = step.node
        assert node is not None
        self._steps[node] = step
        self._actions.operations += 1
        operation = node.operation
        if operation is not None:  # it was given at once
            step.given = operation
            self._checker.behind(operation, self._before(step))
        if self._actions.below(3) == 0:
            self._calls.append(node)
            node.add_done_callback(self._called.append)

    # -- operations ----------------------------------------------------------------------------------------------

    def _upload(self, part: Part) -> None:
        value = self._actions.below(1 << 16)
        options, after = self._options()
        array = np.full((part[2] - part[1]) * CELL, value, np.uint32)
        node = self._coordinator.upload(array, self._of(part), **options)
        self._registered("upload", node, (), (part,), value, after)

    def _bump(self, part: Part) -> None:
        term = self._actions.below(1000)
        options, after = self._options()
        shares = self._actions.below(12) == 0
        if shares:
            options["stream"] = self._actions._stream(self._device)
        target = self._of(part)
        node = self._coordinator.compute(AFFINE, 1, 32, target, target.size, 5, term, **options)
        self._registered("bump", node, (part,), (part,), term, after).shares = shares

    def _blend(self, part: Part) -> None:
        term = self._actions.below(1000)
        options, after = self._options()
        buffer, first, last = part
        source = (buffer + 1) % len(self._buffers), first, last
        if source[0] == buffer:
            self._bump(part)
            return
        target, operand = self._of(part), self._of(source)
        reads: tuple[Part, ...] = (source,)
        form = self._chance.randrange(5)
        if form == 0:  # it might read its target, for all that is said
            reads = (source, part)
        elif form == 1:
            options |= {"reads": [operand], "writes": [target]}
        else:
            options["writes"] = [target]
        node = self._coordinator.compute(BLEND, 1, 32, target, operand, term, target.size, **options)
        self._registered("blend", node, reads, (part,), term, after)

    def _download(self, part: Part) -> None:
        options, after = self._options()
        node = self._coordinator.download(self._of(part), **options)
        self._brings(self._registered("download", node, (part,), (), 0, after), node)

    @staticmethod
    def _brings(step: Step, node: Node[Any]) -> None:
        def brought(node: Node[Any]) -> None:
            if node.state == "done":
                step.brought = [node.result()]

        node.add_done_callback(brought)

    def _relay(self) -> None:
        """Over an array of the host to another buffer, and nobody waits in between."""
        buffer = self._chance.randrange(len(self._buffers))
        first = self._chance.randrange(CELLS)
        last = self._chance.randint(first + 1, CELLS)
        source = buffer, first, last
        target = (buffer + 1) % len(self._buffers), first, last
        array = np.empty((last - first) * CELL, np.uint32)
        node = self._coordinator.download(self._of(source), out=array)
        down = self._registered("download", node, (source,), (), 0, [])
        self._brings(down, node)
        down.is_relayed = True
        up = self._coordinator.upload(array, self._of(target))
        self._registered("relay", up, (), (target,), 0, [down]).relayed = down

    def _fresh(self, part: Part) -> None:
        """A buffer of its own, known by the node that fills it."""
        value = self._actions.below(1 << 16)
        options, after = self._options()
        upload = self._coordinator.upload(np.full(CELL, value, np.uint32), **options)
        step = self._registered("upload", upload, (), (), value, after)
        options, after = self._options()
        download = self._coordinator.download(upload, **options)
        self._registered("download", download, (), (), 0, [*after, step])

        def brought(node: Node[Any]) -> None:
            if node.state == "done" and not (node.result() == value).all():
                self._checker.found(f"V2 {node!r} brought something else than {upload!r} took up")

        download.add_done_callback(brought)

    def _host(self, part: Part) -> None:
        """A function of the host, which looks at what has come before it."""
        options, after = self._options()
        fails = self._actions.below(4) == 0
        steps: list[Step] = []

        def look() -> None:
            for step in steps:
                for other in step.behind:
                    if other.node is not None and not other.node.done():
                        self._checker.found(f"V9 {step!r} ran before {other!r} was done")
            if fails:
                steps[0].broken = True
                raise PlannedError("a function of the host fails")

        async def looked() -> None:
            look()
            await self._actions._pause()

        chosen = looked if self._actions.below(2) else look
        node = self._coordinator.host(chosen, reads=[self._of(part)], **options)
        steps.append(self._registered("host", node, (part,), (), 0, after))

    async def _bracket(self, part: Part) -> None:
        value = self._actions.below(1 << 16)
        options, after = self._options()
        target = self._of(part)
        bracket = self._coordinator.operation("kernel", writes=[target], **options)
        step = Step("bracket", bracket, (), (part,), value)
        self._begin(self._body(bracket, step, after, target))
        await asyncio.sleep(0)

    async def _body(self, bracket: Bracket, step: Step, after: list[Step], target: Any) -> None:
        actions = self._actions
        raises, pauses = actions.below(3) == 0, actions.below(2)
        self._note(step, after)
        try:
            async with bracket:
                if not raises or actions.below(2):
                    assert bracket.stream is not None
                    self._checker.behind(bracket.stream.fill(target, step.value), self._before(step))
                if pauses:
                    await actions._pause()
                if raises:
                    step.broken = True
                    raise PlannedError("a block raises")
        except (PlannedError, SkippedError, ClosedError) as error:
            self._checker.heard.error(error)
        except asyncio.CancelledError:
            step.left = True
            raise


def _leaves(error: BaseException | None) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    elif error is not None:
        yield error
