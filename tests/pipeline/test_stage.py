from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from aiocuda import InvalidArgumentError, InvalidTypeError, Slot, Stage, Stream
from aiocuda.pipeline._plan import Plan
from aiocuda.pipeline._resources import OrderedGate
from aiocuda.pipeline._stage import operations_of
from tests.helpers import quickly


async def coroutine(slot: Slot) -> None: ...


def plain(slot: Slot) -> None: ...


class Awaits:
    async def __call__(self, slot: Slot) -> None: ...

    async def method(self, slot: Slot) -> None: ...

    def enqueues(self, slot: Slot) -> None: ...


@pytest.mark.parametrize(
    "function", [coroutine, Awaits(), Awaits().method, functools.partial(coroutine), functools.partial(Awaits())]
)
def test_coroutine_functions_await(function: Any) -> None:
    assert Stage("a", function).awaits


@pytest.mark.parametrize("function", [plain, lambda slot: None, Awaits().enqueues, functools.partial(plain), print])
def test_other_functions_enqueue(function: Any) -> None:
    assert not Stage("a", function).awaits


def test_bad_stages_are_refused() -> None:
    wrong: Any = 7
    with pytest.raises(InvalidTypeError, match="string as its name, not 7"):
        Stage(wrong, plain)
    with pytest.raises(InvalidArgumentError, match="must not be empty"):
        Stage("", plain)
    with pytest.raises(InvalidTypeError, match="'a' needs a function of a slot, not int"):
        Stage("a", wrong)


@pytest.mark.parametrize(
    ("kinds", "states"),
    [
        ("e", "p"),
        ("ee", "ud"),
        ("eee", "upd"),
        ("eeee", "uppd"),
        ("aeee", "uupd"),
        ("aeeea", "uupdd"),
        ("eaea", "updd"),
        ("ae", "up"),
        ("aea", "upd"),
        ("a", "p"),
        ("aa", "ud"),
        ("aaa", "upd"),
    ],
)
def test_a_slots_state_comes_from_the_stages_place(kinds: str, states: str) -> None:
    """a: awaits, e: enqueues."""
    stages = [Stage(str(index), coroutine if kind == "a" else plain) for index, kind in enumerate(kinds)]
    assert "".join(state[0] for state in Plan(stages).states) == states


@pytest.mark.asyncio
async def test_what_a_stage_may_return(stream: Stream) -> None:
    operation, event = stream.synchronize(), stream.record()
    enqueues, awaits = Stage("e", plain), Stage("a", coroutine)
    for stage in (enqueues, awaits):
        assert operations_of(stage, None) == ()
        assert operations_of(stage, operation) == (operation,)
        assert operations_of(stage, event) == (event.operation,)
        assert operations_of(stage, [operation, event]) == (operation, event.operation)
    assert operations_of(enqueues, []) == ()
    for result in (7, [], [7], "text", {"a": 1}):
        assert operations_of(awaits, result) is None
    for wrong in (7, [7], [operation, 7], "text"):
        with pytest.raises(
            InvalidTypeError, match=f"not {type(wrong).__name__}: return what the stream's method returned"
        ):
            operations_of(enqueues, wrong)


def test_a_coroutine_from_a_plain_function_is_refused_and_closed() -> None:
    with pytest.raises(InvalidTypeError, match="not coroutine: declare it `async def`"):
        operations_of(Stage("e", lambda slot: coroutine(slot)), coroutine(Slot(0)))


@pytest.mark.asyncio
async def test_a_turnstile_lets_numbers_pass_in_order() -> None:
    ordered_gate = OrderedGate()
    passed: list[int] = []

    async def go(number: int) -> None:
        await ordered_gate.enter(number)
        passed.append(number)
        ordered_gate.leave(number)

    others = [asyncio.create_task(go(number)) for number in (3, 1, 5)]
    await asyncio.sleep(0)
    assert passed == []
    ordered_gate.leave(2)  # not coming
    gone = asyncio.create_task(go(4))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    ordered_gate.leave(4)
    await go(0)
    await quickly(asyncio.gather(*others))
    assert passed == [0, 1, 3, 5]
