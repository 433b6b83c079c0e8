"""I3: the order of stages, and which of them share a stream."""

from __future__ import annotations

from typing import Any

import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError, Slot, Stage
from aiocuda.pipeline._plan import Plan


async def coroutine(slot: Slot) -> None: ...


def plain(slot: Slot) -> None: ...


def diamond(**streams: Any) -> Plan:
    return Plan(
        [
            Stage("up", plain),
            Stage("left", plain),
            Stage("right", plain, after="up"),
            Stage("down", plain, after=("left", "right")),
        ],
        **streams,
    )


def test_prerequisites_are_the_stage_before_or_the_named_stages() -> None:
    plan = diamond()
    assert plan.prerequisites == [(), (0,), (0,), (1, 2)]
    assert plan.successors == [(1, 2), (3,), (3,), ()]
    assert plan.ancestors == [(), (0,), (0,), (0, 1, 2)]
    assert plan.roots == [0]
    assert str(plan) == "up → left, up → right, left+right → down"


def test_a_stage_may_have_no_prerequisites() -> None:
    plan = Plan([Stage("a", plain), Stage("b", coroutine, after=()), Stage("c", plain, after=["a", "b", "a"])])
    assert plan.roots == [0, 1]
    assert plan.prerequisites[2] == (0, 1)
    assert str(plan) == "a, b, a+b → c"


@pytest.mark.parametrize(
    ("kinds", "after", "states"),
    [
        ("eeee", [None, None, (0,), (1, 2)], "uppd"),  # fork and join
        ("eee", [None, None, (0,)], "udd"),  # fork without a join
        ("eaee", [None, (0,), (0,), (1, 2)], "uppd"),  # a host stage beside a device stage
        ("eee", [None, (), (0, 1)], "uud"),  # two sources
        ("ae", [None, ()], "pp"),  # side by side
    ],
)
def test_a_slots_state_comes_from_the_stages_place(
    kinds: str, after: list[tuple[int, ...] | None], states: str
) -> None:
    """I1. a: awaits, e: enqueues."""
    stages = [
        Stage(str(index), coroutine if kind == "a" else plain, after=before if before is None else map(str, before))
        for index, (kind, before) in enumerate(zip(kinds, after, strict=True))
    ]
    assert "".join(state[0] for state in Plan(stages).states) == states


def test_the_longest_way() -> None:
    assert diamond().longest_path([1, 5, 2, 1]) == (7, [0, 1, 3])
    assert diamond().longest_path([1, 5, 6, 1]) == (8, [0, 2, 3])
    assert Plan([Stage("a", plain), Stage("b", plain, after=())]).longest_path([3, 2]) == (3, [0])


def test_stages_share_streams() -> None:
    assert diamond().stream_groups == [(0,), (1,), (2,), (3,)]
    assert diamond(streams=[("left", "right"), ("down",)]).stream_groups == [(0,), (1, 2), (3,)]
    assert diamond(streams=[("down", "up")]).stream_groups == [(0, 3), (1,), (2,)]
    assert diamond(streams=[()]).stream_groups == [(0,), (1,), (2,), (3,)]


def test_bad_plans_are_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match="'b' comes after 'c', which is no stage before it in the list; there"
    ):
        Plan([Stage("a", plain), Stage("b", plain, after="c"), Stage("c", plain)])
    with pytest.raises(InvalidArgumentError, match=r"'a' comes after 'a', .*; there is none"):
        Plan([Stage("a", plain, after="a")])
    wrong: Any = 7
    for after in (wrong, [wrong]):
        with pytest.raises(InvalidTypeError, match="stage 'a': after is a sequence of stages' names"):
            Stage("a", plain, after=after)
    with pytest.raises(InvalidArgumentError, match="names a stage twice"):
        diamond(streams=[("up", "left"), ("left", "down")])
    with pytest.raises(InvalidArgumentError, match="names a stage twice"):
        diamond(streams=[("up", "up")])
    with pytest.raises(InvalidArgumentError, match="streams names the stage 'sideways', and there are 'up', 'left'"):
        diamond(streams=[("sideways",)])
    with pytest.raises(InvalidArgumentError, match="<Stage b, awaits> has a stream of its own"):
        Plan([Stage("a", plain), Stage("b", coroutine)], [("a", "b")])
    for streams in (wrong, "left", ["left"], [wrong]):
        with pytest.raises(InvalidTypeError, match="streams is a sequence of sequences of stages' names"):
            diamond(streams=streams)
