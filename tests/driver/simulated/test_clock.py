from __future__ import annotations

import pytest

from aiocuda._base._clock import Clock, running_clock


def test_what_is_due_happens_in_order_of_time_and_then_of_entry() -> None:
    clock = Clock()
    happened: list[tuple[int, str]] = []
    for when, name in [(30, "d"), (10, "a"), (20, "b"), (20, "c")]:
        clock.at(when, None, lambda name=name: happened.append((clock.now_ns, name)))  # type: ignore[misc]
    assert clock.next_ns() == 10
    clock.advance(20)
    assert (happened, clock.now_ns, clock.next_ns()) == ([(10, "a"), (20, "b"), (20, "c")], 20, 30)
    clock.spend(100)
    assert (happened[3:], clock.now_ns, clock.next_ns()) == ([(30, "d")], 120, None)


def test_what_happens_may_enter_more_and_it_happens_in_its_turn() -> None:
    clock = Clock()
    happened: list[str] = []

    def first() -> None:
        clock.at(15, None, lambda: happened.append("between"))
        clock.at(5, None, lambda: happened.append("late"))  # its time has passed: as soon as it can
        happened.append("first")

    clock.at(10, None, first)
    clock.at(20, None, lambda: happened.append("last"))
    clock.advance(20)
    assert happened == ["first", "late", "between", "last"]
    assert clock.now_ns == 20


def test_what_happens_lets_the_time_go_on_and_nothing_else() -> None:
    """A verb that is called by what happens costs its time; nothing happens inside of it."""
    clock = Clock()
    happened: list[str] = []

    def slow() -> None:
        clock.spend(50)
        happened.append("slow")

    clock.at(10, None, slow)
    clock.at(20, None, lambda: happened.append("next"))
    clock.advance(20)
    assert (happened, clock.now_ns) == (["slow", "next"], 60)


def test_time_never_goes_back() -> None:
    clock = Clock()
    clock.advance(50)
    clock.advance(20)
    assert clock.now_ns == 50


def test_what_raises_leaves_the_rest_for_later() -> None:
    clock = Clock()
    happened: list[str] = []
    clock.at(10, None, lambda: 1 // 0)
    clock.at(20, None, lambda: happened.append("next"))
    with pytest.raises(ZeroDivisionError):
        clock.advance(30)
    clock.advance(30)
    assert happened == ["next"]


def test_entries_move_to_another_clock_as_far_in_the_future_as_they_were() -> None:
    old, new = Clock(), Clock()
    happened: list[tuple[str, int]] = []
    mine, yours = object(), object()
    old.advance(1_000)
    new.advance(50)
    for when, owner, name in [(1_020, mine, "b"), (1_010, mine, "a"), (1_015, yours, "yours"), (1_020, mine, "c")]:
        old.at(when, owner, lambda name=name: happened.append((name, new.now_ns)))  # type: ignore[misc]
    new.move_entries(mine, old)
    assert old.next_ns() == 1_015
    new.advance(100)
    assert happened == [("a", 60), ("b", 70), ("c", 70)]
    old.advance(2_000)
    assert happened[3:] == [("yours", 100)]


class Follower:
    def __init__(self) -> None:
        self.told: list[Clock | None] = []

    def follow_running_clock(self) -> None:
        self.told.append(running_clock())


def test_living_followers_are_called_when_the_loop_begins_to_run() -> None:
    clock, other = Clock(), Clock()
    kept, gone = Follower(), Follower()
    for each in (kept, kept, gone):
        clock.add_follower(each)
    with clock:
        pass
    with other:
        pass
    told = gone.told
    del gone, each
    with clock:
        pass
    assert (kept.told, told) == ([clock, clock], [clock])


def test_running_clock_is_that_of_the_current_block() -> None:
    clock = Clock()
    assert running_clock() is None
    with clock:
        assert running_clock() is clock
    assert running_clock() is None
