from __future__ import annotations

import importlib

import pytest

import aiocuda.testing
from aiocuda.testing.conformance import DriverConformance, FaultConformance


@pytest.mark.parametrize("name", aiocuda.testing.__all__)
def test_public_names_exist(name: str) -> None:
    value = getattr(aiocuda.testing, name)
    assert value is getattr(importlib.import_module(value.__module__), name)
    assert value.__module__.startswith(("aiocuda.testing.", "aiocuda.driver.simulated."))


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="'Latches'"):
        aiocuda.testing.Latches  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(("suite", "fixture"), [(DriverConformance, "driver"), (FaultConformance, "make_driver")])
def test_suite_without_a_driver_names_the_missing_fixture(suite: type, fixture: str) -> None:
    unfinished = type("TestMine", (suite,), {})()
    with pytest.raises(NotImplementedError, match=f"TestMine has no fixture '{fixture}'"):
        getattr(suite, fixture).__wrapped__(unfinished)
