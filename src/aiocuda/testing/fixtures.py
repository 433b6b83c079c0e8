"""Fixtures: devices, a latch, and a check that aiocuda does not block the event loop; hooks for simulated tests.

The fixtures that run in the test's event loop exist twice, for pytest-asyncio and for anyio's plugin, because each
plugin runs only its own asynchronous fixtures. The public fixtures choose the one of the plugin that runs the test.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ._blocking import LoopGuard

if TYPE_CHECKING:
    from ..device import Device
    from ..driver.simulated import SimulatedDriver
    from ._latch import Latch

#: True if the test itself has passed. Only then do the fixtures check what is left.
PASSED = pytest.StashKey[bool]()


async def _open_device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    from ..device import open_device

    async with open_device(driver="host") as device:
        yield device
        _check_left(request, device)


async def _open_simulated(request: pytest.FixtureRequest, simulated_driver: SimulatedDriver) -> AsyncIterator[Device]:
    import asyncio

    from ..device import open_device
    from ._loop import SimulatedLoop

    if not isinstance(asyncio.get_running_loop(), SimulatedLoop):
        raise pytest.UsageError(
            "simulated_device needs a SimulatedLoop: pytest-asyncio makes one if it has the hook "
            "pytest_asyncio_loop_factories (1.5 has), or mark the test anyio"
        )
    async with open_device(driver=simulated_driver) as device:
        yield device
        _check_left(request, device)
    if simulated_driver.violations and _has_passed(request):
        raise AssertionError("the test broke a rule of CUDA:\n" + "\n".join(simulated_driver.violations))


def _has_passed(request: pytest.FixtureRequest) -> bool:
    """True if the test itself has passed. After a failure the fixtures check nothing."""
    return bool(request.node.stash.get(PASSED, False))


def _check_left(request: pytest.FixtureRequest, device: Device) -> None:
    if _has_passed(request):
        values = request.node.funcargs  # pytest holds the fixtures' values until all fixtures have ended
        for name in [name for name, value in values.items() if type(value).__module__.partition(".")[0] == "aiocuda"]:
            del values[name]
        left = left_on(device)
        if left:
            raise AssertionError("the test left something behind on its device:\n" + "\n".join(left))


def left_on(device: Device) -> list[str]:
    """Return a line for each kind of object that a test has left. Runs on the loop that has used the device."""
    from ..lowlevel import resources_of

    if device.closed or device.driver.fault is not None:
        return []  # a closed device has freed everything, and a lost one cannot free anything
    found = []
    unfinished = device.statistics().in_flight
    if unfinished:
        cure = "await or abandon them; after a cancellation `await device.drain()`"
        found.append(f"{unfinished} unfinished operation{'s' * (unfinished != 1)}: {cure}")
    streams = resources_of(device).streams.open_names()
    if streams:
        found.append(f"open streams ({', '.join(streams)}): use `async with device.stream() as stream`")
    if not found:  # unfinished operations and open streams hold buffers, which need no line of their own
        held = _held_bytes(device)
        if any(held):
            gc.collect()  # buffers that only garbage holds
            held = _held_bytes(device)
        if any(held):
            found.append(f"{held[0]} bytes of device memory and {held[1]} of pinned memory: free or drop those buffers")
    return found


def _held_bytes(device: Device) -> tuple[int, int]:
    """Return the bytes of device memory and of pinned memory that are neither freed nor dropped."""
    from ..lowlevel import resources_of

    for loop_state in resources_of(device).loop_states:
        device.memory.sweep(loop_state.reactor)
    resources_of(device).pinned_pool.sweep()
    return device.memory.live_bytes, sum(region.nbytes for region in resources_of(device).pinned_pool.lent.values())


async def _guard_loop() -> AsyncIterator[None]:
    import asyncio

    with LoopGuard(asyncio.get_running_loop()):
        yield


def _for_asyncio(function: Callable[..., AsyncIterator[Any]], name: str) -> Any:
    pytest_asyncio = sys.modules.get("pytest_asyncio")  # loaded if it is a plugin of this run
    return (pytest_asyncio or pytest).fixture(name=name)(function)


_device_of_asyncio = _for_asyncio(_open_device, "_aiocuda_device_of_asyncio")
_simulated_of_asyncio = _for_asyncio(_open_simulated, "_aiocuda_simulated_of_asyncio")
_guard_of_asyncio = _for_asyncio(_guard_loop, "_aiocuda_guard_of_asyncio")
_device_of_anyio = pytest.fixture(name="_aiocuda_device_of_anyio")(_open_device)
_simulated_of_anyio = pytest.fixture(name="_aiocuda_simulated_of_anyio")(_open_simulated)
_guard_of_anyio = pytest.fixture(name="_aiocuda_guard_of_anyio")(_guard_loop)


def _choose(request: pytest.FixtureRequest, name: str) -> Any:
    if "anyio_backend" in request.fixturenames:
        return request.getfixturevalue(f"_aiocuda_{name}_of_anyio")
    if not request.config.pluginmanager.hasplugin("asyncio"):
        raise pytest.UsageError(
            f"{request.fixturename} runs in an event loop: install pytest-asyncio, or mark the test anyio"
        )
    return request.getfixturevalue(f"_aiocuda_{name}_of_asyncio")


@pytest.fixture
def aiocuda_device(request: pytest.FixtureRequest) -> Device:
    """A device on the host driver, opened and closed in the test's event loop.

    It is an error if a test passes and leaves unfinished operations, open streams or buffers.
    """
    device: Device = _choose(request, "device")
    return device


@pytest.fixture
def aiocuda_seed() -> int:
    """The seed of this run of the test. With ``--aiocuda-seeds N`` the test runs with the seeds 0 to N - 1."""
    raise pytest.UsageError(
        "aiocuda_seed has no value here: a test, or a fixture of it, must have the argument aiocuda_seed"
    )


@pytest.fixture
def _aiocuda_simulated() -> None:
    """Mark the tests that use the `simulated_driver` or `simulated_device` of aiocuda, not of another project."""


@pytest.fixture
def simulated_driver(aiocuda_seed: int, _aiocuda_simulated: None) -> Iterator[SimulatedDriver]:
    """The driver of `simulated_device`, seeded with `aiocuda_seed`. The test runs on a `SimulatedLoop`.

    Override it for injected faults or for two devices. The override uses `aiocuda_seed`, too::

        @pytest.fixture
        def simulated_driver(aiocuda_seed):
            return SimulatedDriver(aiocuda_seed, devices=2, upsets=[Upset("slow", 3)])
    """
    from ..driver.simulated import SimulatedDriver

    driver = SimulatedDriver(aiocuda_seed)
    yield driver
    driver.close()


@pytest.fixture
def simulated_device(
    request: pytest.FixtureRequest, simulated_driver: SimulatedDriver, _aiocuda_simulated: None
) -> Device:
    """A device on `simulated_driver`, opened and closed in the test's event loop, a `SimulatedLoop`.

    With ``--aiocuda-seeds N`` the test runs once for each seed from 0 to N - 1. It is an error if a test passes and
    leaves unfinished operations, open streams or buffers. It is also an error if a test breaks a rule of CUDA, even
    without an effect in this run: for example, two streams use one buffer and neither waits for the other.
    """
    device: Device = _choose(request, "simulated")
    return device


@pytest.fixture
def aiocuda_latch(aiocuda_device: Device) -> Iterator[Latch]:
    """A `Latch` for `aiocuda_device`. It is released at the end of the test."""
    from ._latch import Latch

    with Latch(aiocuda_device) as latch:
        yield latch


@pytest.fixture
def aiocuda_no_blocking(request: pytest.FixtureRequest) -> None:
    """Fail the test if a call of aiocuda blocks its event loop; see `aiocuda.testing._blocking`."""
    _choose(request, "guard")


# -- tests of the simulated driver: a simulated loop, with pytest-asyncio or anyio, and one test for each seed ---------


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
