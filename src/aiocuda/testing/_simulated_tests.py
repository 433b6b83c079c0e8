"""Run tests of `simulated_driver` on a simulated event loop, with pytest-asyncio or anyio, once for each seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator

import pytest


def _is_simulated(names: Collection[str]) -> bool:
    """Whether a test with these fixtures uses aiocuda's simulated driver.

    Another project may have fixtures named `simulated_driver` and `simulated_device`. They do not use a fixture of
    aiocuda.
    """
    return "_aiocuda_simulated" in names or ("simulated_driver" in names and "aiocuda_seed" in names)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: around pytest-asyncio's
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Make one test for each seed, and choose a simulated loop for it."""
    if "aiocuda_seed" in metafunc.fixturenames:
        seeds = range(metafunc.config.getoption("aiocuda_seeds"))
        metafunc.parametrize("aiocuda_seed", seeds, ids=[f"seed{seed}" for seed in seeds])
    if not _is_simulated(metafunc.fixturenames):
        return (yield)
    if "anyio_backend" in metafunc.fixturenames:
        from ._loop import SimulatedLoop

        # A mark has precedence over the fixture's own parameters, and over a fixture of the user's that has none.
        backend = "asyncio", {"loop_factory": SimulatedLoop}
        metafunc.definition.add_marker(
            pytest.mark.parametrize("anyio_backend", [backend], ids=[pytest.HIDDEN_PARAM], scope="session")
        )
    with _answering(metafunc.config):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Choose the loop once more: pytest-asyncio asks for the loop factories again when it sets up the test."""
    if not _is_simulated(getattr(item, "fixturenames", ())):
        return (yield)
    with _answering(item.config):
        return (yield)


class _Loops:
    """The loop factories for pytest-asyncio. Its hook must answer for every test, so it is registered per test."""

    @staticmethod
    @pytest.hookimpl(optionalhook=True)
    def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], object]]:
        from ._loop import SimulatedLoop

        return {"simulated": SimulatedLoop}


@contextlib.contextmanager
def _answering(config: pytest.Config) -> Iterator[None]:
    loops = _Loops()
    config.pluginmanager.register(loops)
    try:
        yield
    finally:
        config.pluginmanager.unregister(loops)
