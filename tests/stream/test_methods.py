"""The tables of stream methods agree: a new method must be added to each of them."""

from __future__ import annotations

import re
from pathlib import Path

from aiocuda.completion import _stream_queue
from aiocuda.coordination import _group_stream
from aiocuda.device.graphs import _recorder
from aiocuda.device.streams import _checker, _hook, _stream
from aiocuda.pool import _workload

#: Methods that give the stream no work of the program, so that a group's stream need not wait for its prerequisites.
NO_WORK = {"empty", "wait", "end", "capture", "lend", "__cuda_stream__", "aclose"}

#: Methods that end a capture with an error that is the same for all of them.
NOT_IN_A_CAPTURE = {"capture", "lend", "__cuda_stream__", "aclose"}

#: Methods without an operation of their own, which the checker ignores.
UNCHECKED = {"empty", "end", "capture", "lend", "__cuda_stream__", "aclose", "launch_graph"}

_CURE = "src/aiocuda/device/streams/README.md lists the places that a new stream method changes"


def names_in(text: str) -> set[str]:
    return set(re.findall(r'"(\w+)"', text))


def source(module: object) -> str:
    return Path(str(vars(module)["__file__"])).read_text(encoding="utf-8")


def hooked() -> set[str]:
    """The names that streams and graphs pass to a hook."""
    calls = r'_?hook\.call\(\s*"(\w+)"'
    graph = (Path(_recorder.__file__).parent / "_graph.py").read_text(encoding="utf-8")
    return set(re.findall(calls, source(_stream))) | set(re.findall(calls, graph))


def test_each_method_is_named_by_the_hook() -> None:
    documented = set(re.findall(r"``(\w+)``", _hook.StreamHook.__doc__ or ""))
    assert hooked() <= documented, _CURE


def test_group_stream_knows_each_method() -> None:
    assert set(_group_stream._SUBMITTING) | NO_WORK == hooked(), _CURE


def test_recorder_knows_each_method() -> None:
    recorded = names_in(source(_recorder).partition("self._recorded: dict")[2].partition("}")[0])
    assert recorded | set(_recorder._REFUSED) | {"end"} | NOT_IN_A_CAPTURE == hooked(), _CURE


def test_checker_knows_each_method() -> None:
    code = source(_checker).partition("class CheckingHook")[2].partition("\ndef ")[0]
    assert (names_in(code) & hooked()) | UNCHECKED == hooked(), _CURE


def test_workloads_and_sizes_are_of_the_same_kinds() -> None:
    assert set(_stream_queue._SIZED) <= set(_workload._KINDS), _CURE
