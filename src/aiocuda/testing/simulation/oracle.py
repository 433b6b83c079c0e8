"""What ought to become of a coordinator's graph: who comes behind whom, who is skipped, and what is brought."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from ...completion._operation import Operation
from ...coordination import Node

__all__ = ["CELL", "CELLS", "Fate", "Oracle", "Part", "Step"]

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: A buffer is known by its cells, of so many items each.
CELLS, CELL = 4, 4

#: Of an operation: it ran, it did not, or nobody can say.
Fate: TypeAlias = Literal["good", "bad", "unknown"]

#: (buffer, first cell, last cell + 1)
Part: TypeAlias = "tuple[int, int, int]"


class Step:
    """One operation of a graph, and what it comes behind: True where it needs what that one brings."""

    def __init__(
        self, kind: str, node: Node[Any] | None, reads: Sequence[Part], writes: Sequence[Part], value: int
    ) -> None:
        self.kind = kind
        self.node = node
        self.reads = reads
        self.writes = writes
        self.value = value
        self.behind: dict[Step, bool] = {}
        #: What its stream was given; of an operation from outside, that.
        self.given: Operation[Any] | None = None
        #: An operation of the program's; one in a stream of the program's, which others may close or spoil.
        self.outside = self.shares = False
        #: It was withdrawn; its result was dropped; what it does has raised; its block was left by a cancellation.
        self.withdrawn = self.dropped = self.broken = self.left = False
        #: The download into an array of the host that this one uploads.
        self.relayed: Step | None = None
        self.is_relayed = False
        #: What a download is to bring, and which of it is known.
        self.expected: tuple[_Array, _Array] | None = None
        self.fate: Fate = "unknown"
        self.brought: list[_Array] | None = None

    def marks(self) -> Iterator[Operation[Any]]:
        """What later work is to come behind, on the device."""
        if self.given is not None:
            yield self.given
        else:
            for other in self.behind:
                yield from other.marks()

    @property
    def stands(self) -> bool:
        """Can anything be put behind it?"""
        given = self.given
        if given is not None:
            return given.lease is not None or given.failure is not None or given.done()
        return self.node is not None and self.node.state not in ("waiting", "open")

    def __repr__(self) -> str:
        return repr(self.node if self.node is not None else self.given)


class Oracle:
    """Says what an operation comes behind when it is registered, and what has become of all of them at the end.

    Written by cells, one after the other, and so by nothing that the coordinator's own graph is made of.

    Parameters
    ----------
    buffers
        How many there are; nobody knows what stands in them.
    """

    def __init__(self, buffers: int) -> None:
        self.steps: list[Step] = []
        self._buffers = range(buffers)
        self._writers: list[list[Step | None]] = [[None] * CELLS for _ in self._buffers]
        self._readers: list[list[list[Step]]] = [[[] for _ in range(CELLS)] for _ in self._buffers]

    def add(self, step: Step, after: Iterable[Step]) -> None:
        """It has been registered."""
        behind = step.behind
        for buffer, first, last in step.writes:
            for cell in range(first, last):
                writer = self._writers[buffer][cell]
                if writer is not None:
                    behind.setdefault(writer, False)
                for reader in self._readers[buffer][cell]:
                    behind.setdefault(reader, False)
        for buffer, first, last in step.reads:
            for cell in range(first, last):
                writer = self._writers[buffer][cell]
                if writer is not None:
                    behind[writer] = True
        for other in after:
            behind[other] = True
        for buffer, first, last in step.reads:
            for cell in range(first, last):
                self._readers[buffer][cell].append(step)
        for buffer, first, last in step.writes:
            for cell in range(first, last):
                self._writers[buffer][cell] = step
                self._readers[buffer][cell].clear()
        behind.pop(step, None)
        self.steps.append(step)

    # -- at the end ----------------------------------------------------------------------------------------------

    def judge(self, upset: bool) -> Iterator[str]:
        """All have ended: what is wrong with that. With an upset, some may have failed by themselves."""
        for step in self._in_order():
            needed = [other for other, needs in step.behind.items() if needs]
            failed = [other for other in needed if other.fate == "bad"]
            unknown = any(other.fate == "unknown" for other in needed)
            state = self._state(step)
            step.fate = self._fate(step, state, upset)
            if state == "skipped":
                if not (failed or unknown):
                    yield f"V9 {step!r} was skipped, and nothing that it needs had failed: {needed!r}"
                error = None if step.node is None else step.node.exception()
                if error is None or error.__cause__ is None:
                    yield f"V9 {step!r} was skipped, and does not say why"
            elif failed and (state == "done" or step.broken):
                yield f"V9 {step!r} ran, and needs what {failed[0]!r} was to bring"
            elif state == "failed" and not (upset or step.broken or step.shares):
                yield f"V9 {step!r} failed, and nothing was to go wrong"
            elif step.broken and state not in ("failed", "abandoned"):
                yield f"V9 {step!r} is {state}, and what it did has raised"
        yield from self._compare()

    def _in_order(self) -> list[Step]:
        """Each behind all that it comes behind; an edge may have been added to what was registered before its end."""
        found: dict[Step, None] = {}
        left = self.steps[::-1]
        while left:
            step = left[-1]
            missing = [other for other in step.behind if other not in found]
            left += missing
            if not missing:
                found[left.pop()] = None
        return list(found)

    @staticmethod
    def is_behind(step: Step, other: Step) -> bool:
        """Does it come behind the other one, over others perhaps?"""
        seen, left = {step}, [step]
        while left:
            for before in left.pop().behind:
                if before is other:
                    return True
                if before not in seen:
                    seen.add(before)
                    left.append(before)
        return False

    @staticmethod
    def _state(step: Step) -> str:
        if step.node is not None:
            return step.node.state
        return "done" if step.given is None else step.given.state

    @staticmethod
    def _fate(step: Step, state: str, upset: bool) -> Fate:
        """What those that need it have to expect."""
        if state == "done":
            return "good"
        if step.outside:
            return "unknown"
        if step.withdrawn or step.broken or state == "skipped":
            return "bad"
        if state == "failed":  # late, others may have come behind it already
            node = step.node
            return "unknown" if node is not None and step.given is not None and node.operation is step.given else "bad"
        return "unknown" if upset or step.left or not step.dropped else "good"

    def _compare(self) -> Iterator[str]:
        """V2: one after the other, they bring what they have brought."""
        values = [np.zeros(CELLS * CELL, np.uint32) for _ in self._buffers]
        known = [np.zeros(CELLS * CELL, bool) for _ in self._buffers]
        for step in self.steps:
            if step.outside:
                continue
            if step.fate != "good":
                for buffer, first, last in step.writes:
                    known[buffer][first * CELL : last * CELL] = False
                continue
            if step.kind == "download" and step.reads:
                ((buffer, first, last),) = step.reads
                part = slice(first * CELL, last * CELL)
                step.expected = values[buffer][part].copy(), known[buffer][part].copy()
            if step.brought is not None:
                for (buffer, first, last), found in zip(step.reads, step.brought, strict=True):
                    sure = known[buffer][first * CELL : last * CELL]
                    if not np.array_equal(found[sure], values[buffer][first * CELL : last * CELL][sure]):
                        yield f"V2 {step!r} brought something else than what was written"
            for buffer, first, last in step.writes:
                part = slice(first * CELL, last * CELL)
                if step.relayed is not None:
                    expected = step.relayed.expected
                    known[buffer][part] = False
                    if expected is not None and step.relayed.brought is not None:  # else its array was not written
                        values[buffer][part], known[buffer][part] = expected
                    continue
                sources = [values[b][f * CELL : t * CELL] for b, f, t in step.reads]
                values[buffer][part] = _computed(step, sources)
                known[buffer][part] = all(known[b][f * CELL : t * CELL].all() for b, f, t in step.reads)


def _computed(step: Step, sources: list[_Array]) -> Any:
    if step.kind == "bump":
        return sources[0] * np.uint32(5) + np.uint32(step.value)
    if step.kind == "blend":
        return sources[0] * np.uint32(3) + np.uint32(step.value)
    return np.uint32(step.value)
