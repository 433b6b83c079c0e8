"""`lifespan(freeze=…)`: the objects of the start are kept out of garbage collections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocuda
from aiocuda import InvalidTypeError, PerformanceWarning
from aiocuda._base._collections import COLLECTIONS
from aiocuda.serving.asgi import _lifespan, lifespan
from tests.helpers import turns, until
from tests.serving.asgi.server import Server, running, serving

FROZEN = _lifespan.FROZEN_BY_PROGRAM


@pytest.fixture
def freezes() -> Iterator[None]:
    """No object is frozen at first. In the end all are: the objects of pytest make each collection slow."""
    gc.unfreeze()
    yield
    gc.freeze()


class App:
    """An application, which refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@contextlib.asynccontextmanager
async def setup(app: Any) -> AsyncIterator[None]:
    async with aiocuda.open_device(driver="host"):
        yield


@pytest.mark.asyncio
async def test_objects_are_frozen_while_the_application_serves(freezes: None) -> None:
    garbage = App()
    known = weakref.ref(garbage)
    del garbage
    async with lifespan(setup)(App()):
        assert gc.get_freeze_count() > FROZEN
        assert known() is None  # collected, and not frozen
    assert gc.get_freeze_count() == 0


@pytest.mark.asyncio
async def test_objects_of_a_failed_application_are_not_frozen(freezes: None) -> None:
    with pytest.raises(ValueError, match="the server fails"):
        async with lifespan(setup)(App()):
            raise ValueError("the server fails")
    assert gc.get_freeze_count() == 0


@pytest.mark.asyncio
async def test_start_that_fails_freezes_nothing(freezes: None) -> None:
    @contextlib.asynccontextmanager
    async def fails(app: Any) -> AsyncIterator[None]:
        raise ValueError("no model")
        yield

    with pytest.raises(ValueError, match="no model"):
        async with lifespan(fails)(App()):
            pass
    assert gc.get_freeze_count() < FROZEN


@pytest.mark.asyncio
@pytest.mark.heavy
@pytest.mark.slow
async def test_fifty_applications_leave_nothing(freezes: None) -> None:
    apps: list[weakref.ref[App]] = []
    for _ in range(50):
        app = App()
        apps.append(weakref.ref(app))
        async with lifespan(setup)(app):
            pass
        del app
    gc.collect()
    assert [known() for known in apps if known() is not None] == []


@pytest.mark.asyncio
async def test_applications_in_each_other_and_side_by_side(freezes: None) -> None:
    """The first one freezes, and unfreezes at its end."""
    async with lifespan(setup)(App()):
        count = gc.get_freeze_count()
        async with lifespan(setup)(App()), lifespan(setup)(App()):
            assert gc.get_freeze_count() <= count  # a frozen object may end
        assert FROZEN < gc.get_freeze_count() <= count

    first, second = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    await first.enter_async_context(lifespan(setup)(App()))
    await second.enter_async_context(lifespan(setup)(App()))
    await first.aclose()
    assert gc.get_freeze_count() == 0
    await second.aclose()
    assert gc.get_freeze_count() == 0


@pytest.mark.asyncio
async def test_objects_that_the_program_has_frozen_stay_frozen(freezes: None) -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # no automatic collection
    try:
        gc.freeze()
        garbage = App()
        known = weakref.ref(garbage)
        del garbage
        async with lifespan(setup)(App()):
            assert known() is not None  # nothing was collected
        assert gc.get_freeze_count() > FROZEN
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.asyncio
async def test_without_the_collector_nothing_is_frozen(freezes: None) -> None:
    gc.disable()
    try:
        async with lifespan(setup)(App()):
            assert gc.get_freeze_count() < FROZEN
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_freezing_can_be_refused(freezes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_WARN", "0")
    async with lifespan(setup, freeze=False)(App()):
        assert gc.get_freeze_count() < FROZEN
    with pytest.raises(InvalidTypeError, match="freeze"):
        lifespan(setup, freeze=np.ones(2))  # type: ignore[arg-type]


# The warning


def delay(phase: str, info: dict[str, int]) -> None:
    """Let a collection take longer than `_lifespan.LONG`."""
    if phase == "start":
        time.sleep(2 * _lifespan.LONG)  # noqa: TID251 - it stands for many objects


async def warnings_of(setup: Any, collections: int, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerformanceWarning)
        gc.disable()  # on a busy machine, a collection that comes by itself may take long, too
        gc.callbacks.append(delay)
        try:
            async with lifespan(setup, **options)(App()):
                for _ in range(collections):
                    gc.collect()
                    await turns(2)
        finally:
            gc.callbacks.remove(delay)
            gc.enable()
    assert all(each.category is PerformanceWarning and each.filename == __file__ for each in caught), caught
    return [str(each.message) for each in caught]


@pytest.mark.asyncio
@pytest.mark.slow
async def test_long_collection_is_reported_once(freezes: None) -> None:
    (message,) = await warnings_of(setup, 2, freeze=False)
    assert message.startswith("garbage collection of generation 2, ")
    assert "freeze=True" in message
    assert "AIOCUDA_WARN=0" in message
    assert COLLECTIONS.observers == []


@pytest.mark.asyncio
@pytest.mark.slow
async def test_long_collections_are_not_reported_with_freezing(freezes: None) -> None:
    assert await warnings_of(setup, 1) == []


@pytest.mark.asyncio
@pytest.mark.slow
async def test_advice_can_be_switched_off(freezes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCUDA_WARN", "0")
    assert await warnings_of(setup, 1, freeze=False) == []
    assert COLLECTIONS.observers == []


def test_collection_after_the_loop_was_closed_is_not_reported(freezes: None) -> None:
    """The server may end without leaving the lifespan."""
    stack = contextlib.AsyncExitStack()

    async def main() -> None:
        @contextlib.asynccontextmanager
        async def nothing(app: Any) -> AsyncIterator[None]:
            yield

        await stack.enter_async_context(lifespan(nothing, freeze=False)(App()))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    (observer,) = COLLECTIONS.observers
    loop.close()
    from aiocuda._base._collections import Collection

    observer(Collection(2, 0.0, 1.0))
    assert COLLECTIONS.observers == []
    asyncio.run(stack.aclose())


# Servers


async def frozen_by_process(server: Server, processes: int) -> dict[int, int]:
    """Return the numbers of frozen objects by process; ask until so many processes have answered."""
    found: dict[int, int] = {}
    for _ in range(500):
        answer = json.loads((await server.get("/frozen"))[1])
        found[answer["pid"]] = answer["frozen"]
        if len(found) == processes:
            break
    return found


@pytest.mark.asyncio
@pytest.mark.heavy
@pytest.mark.slow
async def test_each_worker_freezes() -> None:
    async with serving("--workers", "2") as server:
        await until(lambda: server.text.count("Application startup complete") == 2)
        found = await frozen_by_process(server, 2)
        assert len(found) == 2
        assert min(found.values()) > FROZEN
        server.terminate()
        await server.ended()


@pytest.mark.asyncio
@pytest.mark.heavy
@pytest.mark.slow
async def test_process_that_is_reloaded_freezes(tmp_path: Path) -> None:
    source = tmp_path / "changed.py"
    source.write_text("")
    async with serving("--reload", "--reload-dir", str(tmp_path)) as server:
        (before,) = (await frozen_by_process(server, 1)).items()
        later = source.stat().st_mtime + 10
        os.utime(source, (later, later))
        await until(lambda: server.text.count("Application startup complete") == 2)
        (after,) = (await frozen_by_process(server, 1)).items()
        assert after[0] != before[0]
        assert min(before[1], after[1]) > FROZEN


@pytest.mark.asyncio
@pytest.mark.heavy
@pytest.mark.slow
async def test_workers_of_gunicorn_that_share_a_loaded_application_freeze() -> None:
    worker = "uvicorn_worker" if importlib.util.find_spec("uvicorn_worker") is not None else "uvicorn.workers"
    command = ("gunicorn", "--preload", "-w", "2", "-k", f"{worker}.UvicornWorker", "--bind", "127.0.0.1:0")
    async with running(
        *command, "tests.serving.asgi.service_program:app", started="Application startup complete"
    ) as server:
        await until(lambda: server.text.count("Application startup complete") == 2)
        found = await frozen_by_process(server, 2)
        assert len(found) == 2
        assert min(found.values()) > FROZEN
        server.terminate()
        assert await server.ended() == 0
