"""Opening a device: warnings and errors for wrong use, and the line that they name."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

import aiocuda
from aiocuda import DrainTimeoutWarning, HostDriverWarning, InvalidTypeError, NoEventLoopError
from aiocuda._base._types import SourceLine
from aiocuda.driver.cuda import _probe
from tests.helpers import Latch

CURE = "use `async with aiocuda.open_device() as device`, or `device = await aiocuda.open_device()`"


def line_of(text: str) -> int:
    """Where this file has these words."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.rstrip().endswith(text))
    return number


def test_used_without_being_opened() -> None:
    opening: Any = aiocuda.open_device(driver="host")
    for name in ("stream", "aclose", "name"):
        with pytest.raises(AttributeError, match=f"no device yet and has no '{name}': {CURE[:12]}") as caught:
            getattr(opening, name)
        assert str(caught.value).endswith(CURE)
    with pytest.raises(AttributeError, match=r"has no 'nonsense'$"):
        _ = opening.nonsense
    assert not hasattr(opening, "stream")
    with pytest.raises(InvalidTypeError, match="not `with`: use `async with"), opening:
        pass


def test_never_awaited() -> None:
    """As it is with a coroutine, and with the place."""
    with pytest.warns(RuntimeWarning, match="open_device\\(\\) was never awaited: use `async with") as told:
        aiocuda.open_device(driver="host")  # here it is forgotten
        gc.collect()
    (warning,) = told
    assert (warning.filename, warning.lineno) == (__file__, line_of("# here it is forgotten"))


def test_without_asyncios_loop() -> None:
    """As trio runs a coroutine, by `send`."""
    with pytest.raises(NoEventLoopError, match=r"asyncio\.run\(main\(\)\).*trio"):
        aiocuda.open_device(driver="host").__await__().send(None)


@pytest.mark.asyncio
async def test_awaited_or_entered_device_causes_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with aiocuda.open_device(driver="host"):
            pass
        await (await aiocuda.open_device(driver="host")).aclose()
        with pytest.raises(aiocuda.InvalidArgumentError):
            await aiocuda.open_device(9, driver="host")
        gc.collect()


@pytest.mark.asyncio
async def test_fallback_warning_names_the_line_that_opens_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AIOCUDA_DRIVER", raising=False)
    monkeypatch.setattr(_probe, "find", lambda: "there is none")
    with pytest.warns(HostDriverWarning, match="there is none") as told:
        async with aiocuda.open_device():  # here it is entered
            pass
    with pytest.warns(HostDriverWarning) as again:
        device = await aiocuda.open_device()  # here it is awaited
    await device.aclose()
    with pytest.warns(HostDriverWarning) as in_a_task:
        opening = aiocuda.open_device()  # here it is called
        await (await asyncio.get_running_loop().create_task(opening.__aenter__())).aclose()
    lines = [(warning.filename, warning.lineno) for warning in (*told, *again, *in_a_task)]
    ends = ("entered", "awaited", "called")
    assert lines == [(__file__, line_of(f"# here it is {end}")) for end in ends]


@pytest.mark.asyncio
async def test_drain_warning_names_the_line_that_leaves_the_device() -> None:
    latches: list[Latch] = []

    async def leave() -> None:
        async with aiocuda.open_device(driver="host") as device:  # here it is left
            device.drain_timeout = 0.01
            latches.append(Latch(device))
            stream = device.stream()
            latches[0].hold(stream)
            await latches[0].held()
            raise ZeroDivisionError

    with (
        pytest.warns(DrainTimeoutWarning, match="1 operation did not finish") as told,
        pytest.raises(ZeroDivisionError),
    ):
        await asyncio.create_task(leave())
    latches[0].release()
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line_of("# here it is left"))]


def test_line_is_warned_about_once_as_usual_in_python() -> None:
    program = """
    from aiocuda._base._types import SourceLine
    for _ in range(3):
        SourceLine.of_caller().warn("once", RuntimeWarning)
    """
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.stderr.count("RuntimeWarning: once") == 1


def test_the_place_of_what_only_the_loop_called_is_where_the_loop_was_run() -> None:
    found: list[SourceLine] = []

    async def main() -> None:
        of_caller = SourceLine.of_caller.__func__  # type: ignore[attr-defined]  # called by `map`, it has no frame above
        asyncio.get_running_loop().call_soon(found.extend, map(of_caller, [SourceLine]))
        await asyncio.sleep(0)

    asyncio.run(main())  # here the loop runs
    (place,) = found
    assert str(place) == f"{__file__}:{line_of('# here the loop runs')}"
