"""`ReadyQueue`: by rank, in the order of registration; a node overtaken 64 times rises; none is overtaken forever."""

from __future__ import annotations

import dataclasses

import pytest

from aiocuda.coordination import PRIORITIES, ReadyQueue
from aiocuda.coordination._ready_queue import RISES_AFTER

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

CRITICAL, HIGH, NORMAL, LOW, CLEANUP = range(len(PRIORITIES))


@dataclasses.dataclass(eq=False)
class Waiting:
    """A node that waits for a place, and how often it was overtaken since it was pushed, counted one by one."""

    id: int
    rank: int
    pushed_with: int = 0  #: its rank at that time
    overtaken: int = 0
    counts_alone: bool = False  #: it was the newest of its rank, so it shares no count of a later node


class Desk:
    """A `ReadyQueue`, and a list of its nodes, which is sorted for each look at it."""

    def __init__(self) -> None:
        self.ready: ReadyQueue[Waiting] = ReadyQueue()
        self.number = 0
        self.waiting: list[Waiting] = []

    def register(self, rank: int) -> Waiting:
        self.number += 1
        return self.push(Waiting(self.number, rank, counts_alone=True))

    def push(self, node: Waiting) -> Waiting:
        node.pushed_with, node.overtaken = node.rank, 0
        self.ready.push(node)
        self.waiting.append(node)
        return node

    def remove(self, node: Waiting) -> None:
        self.ready.remove(node)
        self.waiting.remove(node)

    @property
    def first(self) -> Waiting:
        return min(self.waiting, key=lambda node: (node.rank, node.id))

    def serve(self) -> Waiting:
        expected = self.first
        node = self.ready.pop()
        assert node is expected
        self.waiting.remove(node)
        ranks = {other: other.rank for other in self.waiting}
        for other in self.waiting:
            other.overtaken += other.id < node.id
        risen = self.ready.served(node)
        assert len(set(risen)) == len(risen)
        for other, rank in ranks.items():
            assert other.rank == rank - (other in risen)
            if other in risen:  # it has just been overtaken
                assert rank > node.rank
                assert other.id < node.id
                assert not other.counts_alone or other.overtaken == RISES_AFTER
                other.counts_alone = False
        return node


class Schedules(RuleBasedStateMachine):
    """Nodes are registered, served, removed, and pushed again: a dependency may be added to a node that is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.removed: list[Waiting] = []

    @rule(rank=st.sampled_from(range(len(PRIORITIES))), count=st.integers(1, 10))
    def register(self, rank: int, count: int) -> None:
        for _ in range(count):
            self.desk.register(rank)

    @rule(count=st.integers(1, 10))
    def serve(self, count: int) -> None:
        for _ in range(min(count, len(self.desk.waiting))):
            self.desk.serve()

    @rule(rank=st.sampled_from(range(len(PRIORITIES))), count=st.integers(1, RISES_AFTER))
    def serve_what_comes(self, rank: int, count: int) -> None:
        for _ in range(count):
            self.desk.register(rank)
            self.desk.serve()

    @precondition(lambda self: self.desk.waiting)
    @rule(at=st.integers(0, 100), count=st.integers(1, 20))
    def remove(self, at: int, count: int) -> None:
        for _ in range(min(count, len(self.desk.waiting))):
            node = self.desk.waiting[
                -1 - at % len(self.desk.waiting)
            ]  # the newest have the counts of those before them
            self.desk.remove(node)
            node.counts_alone = False
            self.removed.append(node)

    @precondition(lambda self: self.removed)
    @rule(at=st.integers(0, 100))
    def push_again(self, at: int) -> None:
        self.desk.push(self.removed.pop(at % len(self.removed)))

    @invariant()
    def it_is_sorted(self) -> None:
        desk = self.desk
        assert desk.ready.size == len(desk.waiting)
        assert desk.ready.highest == min((node.rank for node in desk.waiting), default=len(PRIORITIES))
        if desk.waiting:
            assert desk.ready.first is desk.first

    @invariant()
    def no_node_is_overtaken_forever(self) -> None:
        for node in self.desk.waiting:
            assert node.overtaken <= RISES_AFTER * node.pushed_with <= 256
            assert node.rank <= max(0, node.pushed_with - node.overtaken // RISES_AFTER)

    def teardown(self) -> None:
        while self.desk.waiting:
            self.desk.serve()
        assert self.desk.ready.size == 0


@pytest.mark.slow
@pytest.mark.timeout(600)  # for the reduction of a failure
def test_it_is_a_sorted_list() -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=50, stateful_step_count=30, deadline=None))


def test_overtaken_64_times_it_rises_one_class() -> None:
    desk = Desk()
    low = desk.register(LOW)
    for count in range(1, 3 * RISES_AFTER + 1):
        desk.register(CRITICAL)
        assert desk.serve() is not low
        assert low.rank == LOW - count // RISES_AFTER
    desk.register(CRITICAL)
    assert desk.serve() is low


@pytest.mark.parametrize("rank", range(len(PRIORITIES)))
def test_endless_critical_work_overtakes_a_node_at_most_256_times(rank: int) -> None:
    desk = Desk()
    waiting = [desk.register(rank) for _ in range(50)]
    served = []
    for _ in range(1000):
        desk.register(CRITICAL)
        served.append(desk.serve())
        assert max((node.overtaken for node in desk.waiting), default=0) <= 256
    assert [node for node in served if node in waiting] == waiting
    assert served.index(waiting[0]) == RISES_AFTER * rank


def test_nodes_registered_later_are_not_overtaken() -> None:
    """A thousand critical nodes that were registered first are served first, and no node rises."""
    desk = Desk()
    for _ in range(1000):
        desk.register(CRITICAL)
    low = desk.register(LOW)
    for _ in range(1000):
        desk.serve()
    assert (low.rank, desk.serve()) == (LOW, low)


def test_counts_of_many_removed_nodes_stay_with_the_nodes_before_them() -> None:
    desk = Desk()
    lows = [desk.register(LOW) for _ in range(40)]
    for _ in range(RISES_AFTER - 1):
        desk.register(CRITICAL)
        desk.serve()
    for low in reversed(lows[2:]):
        desk.remove(low)
    desk.register(CRITICAL)
    desk.serve()
    assert [low.rank for low in lows[:2]] == [NORMAL, NORMAL]
    later = desk.register(LOW)
    for _ in range(RISES_AFTER):
        assert later.rank == LOW
        desk.register(CRITICAL)
        desk.serve()
    assert later.rank == NORMAL
