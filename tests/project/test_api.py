"""What programs could call in earlier releases works, or the CHANGELOG says that it does not.

``tests/project/api`` has the names and signatures of releases; `tests.project.api` records them.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.project.tree import ROOT, SOURCE, python_path

RECORDS = sorted((ROOT / "tests" / "project" / "api").glob("*.json"))

#: What was removed or takes other arguments, with the words of the CHANGELOG.
CHANGED = {
    "aiocuda.CompletionPolicy.plan": "its method `plan` is gone",
    "aiocuda.DeviceStatistics": "`DeviceStatistics.driver_calls_waited`",
    "aiocuda.Device.load": "`device.load` takes several kernels by position",
    "aiocuda.completion.INTERNAL": "`completion.__all__` no longer has `INTERNAL`, `KINDS` and `METHODS`",
    "aiocuda.completion.KINDS": "`completion.__all__` no longer has `INTERNAL`, `KINDS` and `METHODS`",
    "aiocuda.completion.METHODS": "`completion.__all__` no longer has `INTERNAL`, `KINDS` and `METHODS`",
    "aiocuda.data.SyncEpoch.batches_of": "`SyncEpoch.batches_of`",
    "aiocuda.driver.cuda.CudaDriver.fault": "`CudaDriver.fault`",
    "aiocuda.lowlevel.enqueue_shared_mark": "has no `enqueue_shared_mark`",
    "aiocuda.lowlevel.prepare_join": "`lowlevel.prepare_join` and `lowlevel.record_event` take queues",
    "aiocuda.lowlevel.record_event": "`lowlevel.prepare_join` and `lowlevel.record_event` take queues",
    "aiocuda.memory.DeviceMemory.count": "`DeviceMemory` no longer has `count`, `discard`, `free_lists`, `give`",
    "aiocuda.memory.DeviceMemory.discard": "`DeviceMemory` no longer has `count`, `discard`, `free_lists`, `give`",
    "aiocuda.memory.DeviceMemory.free_lists": "`DeviceMemory` no longer has `count`, `discard`, `free_lists`, `give`",
    "aiocuda.memory.DeviceMemory.give": "`DeviceMemory` no longer has `count`, `discard`, `free_lists`, `give`",
    "aiocuda.memory.DeviceMemory.live": "`DeviceMemory` no longer has `count`, `discard`, `free_lists`, `give`",
    "aiocuda.memory.DeviceMemory.take": "`DeviceMemory` no longer has `count`, `discard`, `free_lists`, `give`",
}


def present() -> dict[str, str | None]:
    """Return the record of this library, made by a process of its own: it stubs libraries that are not installed."""
    pytest.importorskip("nvtx")  # has no wheel for the newest Python at first
    made = subprocess.run(
        [sys.executable, "-m", "tests.project.api"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(SOURCE), "AIOCUDA_CORE": "python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    found: dict[str, str | None] = json.loads(made.stdout)
    return found


def parse(text: str) -> Callable[..., dict[str, Any]]:
    """Return a function with a recorded signature, which returns its arguments."""
    function: Callable[..., dict[str, Any]] = eval(f"lambda {text[1:-1]}: locals()")
    return function


def calls(function: Callable[..., Any]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield calls that are valid: each argument is the name of its parameter.

    All arguments by position where possible, and all by name; each with and without those that have a default.
    """
    for all_of_them in (True, False):
        for by_name in (True, False):
            args: list[str] = []
            kwargs: dict[str, str] = {}
            for name, each in inspect.signature(function).parameters.items():
                if each.kind is each.VAR_POSITIONAL:
                    args += [] if by_name else ["more"]
                elif each.kind is each.VAR_KEYWORD:
                    kwargs["more"] = "more"
                elif all_of_them or each.default is each.empty:
                    is_named = each.kind is each.KEYWORD_ONLY or (by_name and each.kind is not each.POSITIONAL_ONLY)
                    if is_named:
                        kwargs[name] = name
                    else:
                        args.append(name)
            yield args, kwargs


def accepts(new: str, old: str) -> bool:
    """Return whether the calls of an old signature are calls of a new one, and each argument gets to its parameter."""
    function = parse(new)
    for args, kwargs in calls(parse(old)):
        try:
            got = function(*args, **kwargs)
        except TypeError:
            return False
        if any(got.get(name, name) != name for name in args):
            return False
    return True


@pytest.mark.parametrize(
    ("old", "new", "is_accepted"),
    [
        ("(a, b=0)", "(a, b=0, c=0, *, d=0)", True),
        ("(a, b=0)", "(a, c=0, b=0)", False),  # b moves
        ("(a, b)", "(b, a)", False),
        ("(a, b=0)", "(a, b)", False),  # needed now
        ("(a)", "(b)", False),  # another name
        ("(a, /)", "(b)", True),
        ("(a, *, b=0)", "(a)", False),
        ("(a, *, b=0)", "(a, **others)", True),
        ("(a)", "(a, *, b)", False),
        ("(a, *b)", "(a)", False),
        ("(a, b, *c, d=0)", "(a=0, b=0, /, *c, d=0, **e)", True),
        ("(a, **b)", "(a)", False),
    ],
)
def test_calls_that_a_signature_accepts(old: str, new: str, is_accepted: bool) -> None:
    assert accepts(new, old) is is_accepted


def broken(recorded: dict[str, str | None], now: dict[str, str | None]) -> set[str]:
    """Return the recorded names that are gone, are not called any more, or take other arguments."""
    found = set()
    for name, old in recorded.items():
        owner, _, member = name.rpartition(".")
        alias = now.get(owner) or "("
        place = name if alias.startswith("(") else f"{alias}.{member}"  # the class has an earlier name
        new = now.get(place)
        is_called = bool(old and new and old[0] == new[0] == "(")
        if place not in now or (is_called and not accepts(str(new), str(old))):
            found.add(name)
    return found


@pytest.mark.slow
def test_each_recorded_name_works_as_recorded() -> None:
    now = present()
    found = [broken(json.loads(path.read_text(encoding="utf-8")), now) for path in RECORDS]
    assert set().union(*found) == CHANGED.keys()


def test_a_name_that_is_gone_or_changed_is_found() -> None:
    recorded = {"m.f": "(a)", "m.g": "(a)", "m.C": "()", "m.C.x": None, "m.D": "m.C"}
    assert broken(recorded, recorded) == set()
    assert broken(recorded, {**recorded, "m.g": "(b)"}) == {"m.g"}
    assert broken(recorded, {"m.f": "(a)", "m.C": "()"}) == {"m.g", "m.C.x", "m.D"}
    moved = {"m.f": "(a)", "m.g": "(a)", "a.C": "()", "a.C.x": None, "m.C": "a.C", "m.D": "a.C"}
    assert broken(recorded, moved) == set()
    assert broken({**recorded, "m.C.y": "()"}, moved) == {"m.C.y"}


def test_changes_are_in_the_changelog() -> None:
    text = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    assert [words for words in CHANGED.values() if words not in text] == []
