"""Programs that misbehave, on the engine "local"."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, NoReturn

import pytest

from aiocuda.cluster import RemoteError, open_cluster
from tests.helpers import quickly


class RaisesWhenPickled(Exception):  # noqa: N818 - raised on purpose
    def __reduce__(self) -> Any:
        raise GeneratorExit


class CancelsWhenPickled(Exception):  # noqa: N818 - raised on purpose
    def __reduce__(self) -> Any:
        raise asyncio.CancelledError


class RaisesAsText(Exception):  # noqa: N818 - raised on purpose
    def __str__(self) -> str:
        raise GeneratorExit


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818 - raised on purpose
    """Refuses notes, as all other attributes."""


class WrongNotes(Exception):  # noqa: N818 - raised on purpose
    def __init__(self) -> None:
        super().__init__()
        self.__notes__ = "no list"


class Hostile:
    """Its methods do what a program should not do."""

    async def fail(self, error: type[Exception]) -> NoReturn:
        raise error


@pytest.mark.asyncio
@pytest.mark.slow
async def test_exceptions_whose_own_methods_raise_reach_the_caller() -> None:
    async with open_cluster("local", replicas=1) as cluster:
        handle = await cluster.spawn(Hostile)
        for kind in (RaisesWhenPickled, CancelsWhenPickled):
            with pytest.raises(RemoteError, match=kind.__name__):
                await quickly(handle.call("fail", kind))
        for other in (RaisesAsText, Frozen, WrongNotes):
            with pytest.raises(other):
                await quickly(handle.call("fail", other))
