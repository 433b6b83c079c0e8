"""Anything, thrown at everything public: what is raised is documented, and the device goes on."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from typing import Any

import pytest

from aiocuda import AiocudaError
from aiocuda.driver.host import HostDriver
from aiocuda.pipeline import PipelineRun
from aiocuda.testing import SimulatedDriver, SimulatedLoop
from tests.bad_input.things import TARGETS, THINGS, Setting, Target, ThrownError, set_up

pytest.importorskip("hypothesis")  # a GPU machine may not have it

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: Virtual seconds that something may be waited for.
PATIENCE = 1.0

#: All that may come out. A time-out is the test's own.
DOCUMENTED = (AiocudaError, ThrownError, TimeoutError)

Call = tuple[Target, list[str], dict[str, str]]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Something to call, and names of things for its parameters."""
    target = draw(st.sampled_from(TARGETS))
    things = st.sampled_from(sorted(THINGS))
    positional: list[str] = []
    keywords: dict[str, str] = {}
    for parameter in target.parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += draw(st.lists(things, max_size=3))
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if parameter.default is inspect.Parameter.empty or draw(st.booleans()):
                keywords[parameter.name] = draw(things)
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            if parameter.default is inspect.Parameter.empty or draw(st.booleans()):
                positional.append(draw(things))
            else:
                break
    return target, positional, keywords


async def _throw(setting: Setting, call: Call) -> None:
    target, positional, keywords = call
    made = [THINGS[name](setting) for name in positional]
    named = {name: THINGS[thing](setting) for name, thing in keywords.items()}
    what = f"{target.name}({', '.join([*positional, *(f'{name}={thing}' for name, thing in keywords.items())])})"
    try:
        result = target.find(setting)(*made, **named)
        await _use(result)
    except Exception as error:
        if _is_documented(error):
            return
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


def _is_documented(error: BaseException) -> bool:
    if isinstance(error, ExceptionGroup):
        return all(map(_is_documented, error.exceptions))
    # An exception of a source of items is raised unchanged.
    return isinstance(error, DOCUMENTED) or any("in the source" in note for note in getattr(error, "__notes__", ()))


async def _use(result: Any) -> None:
    """Whatever it is, take it to its end."""
    async with asyncio.timeout(PATIENCE):
        if inspect.isasyncgen(result) or isinstance(result, PipelineRun):
            async for _ in result:
                break
            await result.aclose()
        elif hasattr(result, "__aenter__") and hasattr(result, "__aexit__"):
            async with result:
                pass
        elif hasattr(result, "__enter__") and hasattr(result, "__exit__"):
            with result:
                pass
        elif inspect.isawaitable(result):
            inner = await result
            if inspect.iscoroutine(result):
                await _use(inner)
        elif isinstance(result, HostDriver):
            result.close()


async def _all(driver: Any, thrown: list[Call]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # no test reads the failures
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is closed
        async with set_up(driver) as setting:
            for call in thrown:
                await _throw(setting, call)
            if driver.fault is None and not setting.device.closed:
                async with setting.device.stream() as stream:
                    assert (await stream.download(await stream.upload(b"abc"))).tobytes() == b"abc"


def throw(thrown: list[Call]) -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(_all(SimulatedDriver(devices=2), thrown))


_SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.slow
@settings(_SETTINGS, max_examples=150, derandomize=True)
@given(st.lists(calls(), min_size=6, max_size=8))
def test_only_documented_errors(thrown: list[Call]) -> None:
    throw(thrown)


@pytest.mark.soak
@settings(_SETTINGS, max_examples=10_000)
@given(st.lists(calls(), min_size=6, max_size=8))
def test_only_documented_errors_for_long(thrown: list[Call]) -> None:
    throw(thrown)
