"""Tests of `simulated_driver`: on a simulated loop, whoever runs them, and with as many seeds as are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: around pytest-asyncio's
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """One test for each seed; and its loop is a simulated one."""
    if "aiocuda_seed" in metafunc.fixturenames:
        seeds = range(metafunc.config.getoption("aiocuda_seeds"))
        metafunc.parametrize("aiocuda_seed", seeds, ids=[f"seed{seed}" for seed in seeds])
    if "simulated_driver" not in metafunc.fixturenames:
        return (yield)
    if "anyio_backend" in metafunc.fixturenames:
        from .simulation.loop import SimulatedLoop

        # A mark has precedence over the fixture's own parameters, and over a fixture of the user's that has none.
        backend = "asyncio", {"loop_factory": SimulatedLoop}
        metafunc.definition.add_marker(
            pytest.mark.parametrize("anyio_backend", [backend], ids=[pytest.HIDDEN_PARAM], scope="session")
        )
    with _answering(metafunc.config):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """pytest-asyncio looks again whether anybody chooses its loops."""
    if "simulated_driver" not in getattr(item, "fixturenames", ()):
        return (yield)
    with _answering(item.config):
        return (yield)


class _Loops:
    """pytest-asyncio asks which loops a test runs on. Its hook has to answer for every test, or not to be there."""

    @staticmethod
    @pytest.hookimpl(optionalhook=True)
    def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], object]]:
        from .simulation.loop import SimulatedLoop

        return {"simulated": SimulatedLoop}


@contextlib.contextmanager
def _answering(config: pytest.Config) -> Iterator[None]:
    loops = _Loops()
    config.pluginmanager.register(loops)
    try:
        yield
    finally:
        config.pluginmanager.unregister(loops)
