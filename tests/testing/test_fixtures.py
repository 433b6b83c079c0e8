"""`simulated_device`, its seeds, and the errors for tests that leave operations, streams or buffers.

The tests of this file read the results of one run of pytest for each plugin that runs coroutines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.forked import ForkingProcess, forking_pytest

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SEEDS = 5

#: What runs the tests, and what marks them so.
RUNNERS = {
    "strict": ("@pytest.mark.asyncio", ("--asyncio-mode=strict", "-o", "asyncio_default_fixture_loop_scope=function")),
    "auto": ("", ("--asyncio-mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")),
    "anyio": ("@pytest.mark.anyio", ("-p", "no:asyncio")),
}

BEGINNING = """
import asyncio
import numpy as np
import pytest
import aiocuda
from aiocuda.testing import SimulatedDriver, SimulatedLoop, Upset, kernels

SPIN = aiocuda.Kernel("spin", source=kernels.SPIN.source, host=kernels.SPIN.host)

if ANYIO:
    fixture = pytest.fixture
    @pytest.fixture
    def anyio_backend():
        return "asyncio"
else:
    from pytest_asyncio import fixture

def loop():
    return asyncio.get_running_loop()
"""

WHERE = """
@marked
async def test_simulated(simulated_device):
    assert isinstance(loop(), SimulatedLoop)
    assert simulated_device.driver.name == "simulated"
    began = loop().time()
    await asyncio.sleep(3600)
    assert 3600 <= loop().time() - began < 3601
    async with simulated_device.stream() as stream:
        assert (await stream.download(await stream.upload(b"abc"))).tobytes() == b"abc"

@marked
async def test_other(aiocuda_device):
    assert not isinstance(loop(), SimulatedLoop)
    assert aiocuda_device.driver.name == "host"
"""

FIXTURES = """
@fixture
async def stream(simulated_device):
    async with simulated_device.stream() as stream:
        yield stream

@fixture
async def buffer(stream):
    return await stream.upload(b"abc")

@marked
async def test_uses_them(stream, buffer):
    assert isinstance(buffer, aiocuda.DeviceBuffer)  # then its class is one of the module aiocuda
    assert isinstance(loop(), SimulatedLoop)
    assert (await stream.download(buffer)).tobytes() == b"abc"
"""

DRIVER = """
@pytest.fixture
def simulated_driver(aiocuda_seed):
    return SimulatedDriver(aiocuda_seed, devices=2, upsets=[Upset("refuse", 1, "upload", 2)])

@marked
async def test_it(simulated_device, simulated_driver, aiocuda_seed):
    assert isinstance(loop(), SimulatedLoop)
    assert simulated_device.driver is simulated_driver
    assert simulated_driver.seed == aiocuda_seed
    async with aiocuda.open_device(1, driver=simulated_driver) as second, second.stream() as stream:
        with pytest.raises(aiocuda.DeviceOutOfMemory):
            await stream.upload(b"abc")
"""

SESSION = """
if ANYIO:
    shared = pytest.fixture(scope="session")
    @shared
    def anyio_backend():  # what lives as long as the session lives in the one loop of the session
        return "asyncio", {"loop_factory": SimulatedLoop}
else:
    shared = fixture(scope="session", loop_scope="session")

@shared
async def device():
    async with aiocuda.open_device(driver=SimulatedDriver(1)) as device:
        yield device

async def there_and_back(device):
    async with device.stream() as stream:
        assert (await stream.download(await stream.upload(b"abc"))).tobytes() == b"abc"

@marked
@pytest.mark.parametrize("turn", range(3))
async def test_it(device, turn):
    await there_and_back(device)

@marked
async def test_on_a_simulated_loop(device, simulated_device):
    assert isinstance(loop(), SimulatedLoop)
    await there_and_back(device)
    await there_and_back(simulated_device)

@marked
async def test_afterwards(device):
    await there_and_back(device)
"""

LOST = """
@marked
async def test_waits_for_nobody(simulated_device):
    await asyncio.Event().wait()

@marked
async def test_next(simulated_device):
    await asyncio.sleep(1)
"""

RACE = """
@marked
async def test_race(simulated_device):
    async with simulated_device.stream() as left, simulated_device.stream() as right:
        one = left.fill(left.empty(64), 1)
        other = right.fill(right.empty(64), 2)
        first = []
        one.add_done_callback(lambda _: first.append("one"))
        other.add_done_callback(lambda _: first.append("other"))
        await aiocuda.gather(one, other)
        await asyncio.sleep(0)
        assert first[0] == "one"
"""

SEED = """
@marked
async def test_mine(aiocuda_seed):
    driver = SimulatedDriver(aiocuda_seed, upsets=[Upset("refuse", 1, "upload", 2)])
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        with pytest.raises(aiocuda.DeviceOutOfMemory):
            await stream.upload(b"abc")
    driver.close()

def test_without_a_loop(aiocuda_seed):
    assert aiocuda_seed in range(5)
"""

LEFT = """
kept = []

@marked
async def test_operation(FIXTURE):
    stream = FIXTURE.stream()
    kept.append(stream)
    stream.launch(SPIN, 1, 1, 1_000_000)

@marked
async def test_stream(FIXTURE):
    kept.append(FIXTURE.stream(name="mine"))

@marked
async def test_buffer(FIXTURE):
    async with FIXTURE.stream() as stream:
        kept.append(await stream.upload(b"abcd"))

@marked
async def test_pinned(FIXTURE):
    kept.append(FIXTURE.pinned(16))
    await kept[-1]

@marked
async def test_nothing(FIXTURE):
    async with FIXTURE.stream() as stream:
        buffer, array = stream.empty(16), FIXTURE.pinned(16)
        cycle = [buffer, array]
        cycle.append(cycle)
        stream.fill(buffer, 1)
        stream.fill(stream.empty(16), 1).abandon()

@marked
async def test_fails_for_another_reason(FIXTURE):
    kept.append(FIXTURE.stream())
    raise ZeroDivisionError
"""

RULE = """
@marked
async def test_two_streams(simulated_device):
    driver = simulated_device.driver
    left, right = driver.stream_create(0, 0), driver.stream_create(0, 0)
    address = driver.allocate(0, 64, left)
    driver.fill(right, address, b"a", 64)
    for stream in (left, right):
        while not driver.stream_query(stream):
            await asyncio.sleep(0)
    driver.deallocate(address, left)
    driver.stream_destroy(left)
    driver.stream_destroy(right)
"""

FILES = {
    "where": WHERE,
    "fixtures": FIXTURES,
    "driver": DRIVER,
    "lost": LOST,
    "race": RACE,
    "seed": SEED,
    "left_simulated": LEFT.replace("FIXTURE", "simulated_device"),
    "left_host": LEFT.replace("FIXTURE", "aiocuda_device"),
    "rule": RULE,
}


#: The fixtures collect garbage after many tests: no collection visits what pytest has made before.
FREEZES = """
import gc

def pytest_collection_finish():
    gc.freeze()
"""


class Run:
    """A run of pytest in a folder of its own."""

    def __init__(self, forks: ForkingProcess, folder: Path, runner: str, *arguments: str) -> None:
        (folder / "freezes.py").write_text(FREEZES, encoding="utf-8")
        options = ["-p", "freezes", "-W", "error", "-rA", "-v", *RUNNERS[runner][1]]
        finished = forks.run([*options, *arguments], folder, {"COLUMNS": "300"})
        self.text = finished.output + finished.errors
        self.lines = self.text.splitlines()

    def of(self, test: str) -> list[str]:
        """Return the outcomes of a test in order, for each seed, with its errors."""
        lines = [line.split() for line in self.lines if line.startswith(f"test_{test}")]
        return [words[1] for words in lines if len(words) > 1 and words[0].partition("[")[0] == f"test_{test}"]


def write(folder: Path, files: dict[str, str], runner: str) -> None:
    for name, source in files.items():
        text = (BEGINNING + source).replace("@marked", RUNNERS[runner][0]).replace("ANYIO", str(runner == "anyio"))
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkingProcess]:
    """A process that forks for each run of pytest."""
    with contextlib.closing(forking_pytest()) as process:
        yield process


@pytest.fixture(scope="module", params=RUNNERS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: ForkingProcess) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, FILES, request.param)
    return Run(forks, folder, request.param, f"--aiocuda-seeds={SEEDS}")


EVERY = ["PASSED"] * SEEDS


# Where it runs


def test_runs_in_virtual_time(run: Run) -> None:
    assert run.of("where.py::test_simulated") == EVERY
    assert run.of("where.py::test_other") == ["PASSED"]


def test_other_fixtures_live_in_the_same_loop(run: Run) -> None:
    assert run.of("fixtures.py::test_uses_them") == EVERY


def test_driver_of_ones_own(run: Run) -> None:
    assert run.of("driver.py::test_it") == EVERY


@pytest.mark.parametrize("runner", RUNNERS)
def test_device_of_a_session_serves_the_loops_of_its_tests(forks: ForkingProcess, tmp_path: Path, runner: str) -> None:
    write(tmp_path, {"session": SESSION}, runner)
    run = Run(forks, tmp_path, runner)
    assert run.of("session.py::test_it") == ["PASSED"] * 3
    assert run.of("session.py::test_on_a_simulated_loop") == ["PASSED"]
    assert run.of("session.py::test_afterwards") == ["PASSED"]


def test_lost_wakeup_fails_the_test_immediately(run: Run) -> None:
    assert run.of("lost.py::test_waits_for_nobody").count("FAILED") == SEEDS  # under anyio its fixtures' ends fail, too
    assert run.of("lost.py::test_next") == EVERY
    assert "LostWakeupError: lost wake-up at " in run.text


@pytest.mark.parametrize("runner", ["strict"])
def test_loop_factories_of_ones_own_stay_for_other_tests(forks: ForkingProcess, tmp_path: Path, runner: str) -> None:
    (tmp_path / "conftest.py").write_text("""
import asyncio

class Mine(asyncio.SelectorEventLoop):
    pass

def pytest_asyncio_loop_factories(config, item):
    return {"mine": Mine}
""")
    write(tmp_path, {"mine": """
@marked
async def test_simulated(simulated_device):
    assert isinstance(loop(), SimulatedLoop)

@marked
async def test_other():
    assert type(loop()).__name__ == "Mine"
"""}, runner)  # fmt: skip
    run = Run(forks, tmp_path, runner)
    assert run.of("mine.py::test_simulated") == run.of("mine.py::test_other") == ["PASSED"]


# Seeds


def test_every_seed_is_a_test_and_a_failure_names_its_own(run: Run) -> None:
    outcomes = run.of("race.py::test_race")
    assert len(outcomes) == SEEDS
    assert {"PASSED", "FAILED"} == set(outcomes)
    again = [line for line in run.lines if "test_race.py::test_race" in line and "the same again: pytest" in line]
    for seed, outcome in enumerate(outcomes):
        line = f'seed {seed}; the same again: pytest "test_race.py::test_race[seed{seed}]" --aiocuda-seeds {seed + 1}'
        assert (line in again) == (outcome == "FAILED")


def test_seed_that_has_failed_fails_again(run: Run, forks: ForkingProcess, tmp_path: Path) -> None:
    seed = run.of("race.py::test_race").index("FAILED")
    write(tmp_path, {"race": RACE}, "strict")
    alone = Run(forks, tmp_path, "strict", f"test_race.py::test_race[seed{seed}]", "--aiocuda-seeds", str(seed + 1))
    assert alone.of("race.py::test_race") == ["FAILED"]


def test_seed_by_itself(run: Run) -> None:
    """For a test that makes its driver, and its chances, itself."""
    assert run.of("seed.py::test_mine") == run.of("seed.py::test_without_a_loop") == EVERY


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_number_of_seeds_is_checked(pytester: pytest.Pytester, number: str) -> None:
    result = pytester.runpytest_inprocess("-p", "aiocuda.testing.plugin", f"--aiocuda-seeds={number}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--aiocuda-seeds: '{number}' is not a number of seeds, at least 1"])


# Objects that a test leaves


@pytest.mark.parametrize("fixture", ["simulated", "host"])
@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("operation", "1 unfinished operation: await or abandon them; after a cancellation `await device.drain()`"),
        ("stream", "open streams (mine): use `async with device.stream() as stream`"),
        ("buffer", "4 bytes of device memory and 0 of pinned memory: free or drop those buffers"),
        ("pinned", "0 bytes of device memory and 4096 of pinned memory: free or drop those buffers"),
    ],
)
def test_left_object_is_an_error(run: Run, fixture: str, test: str, found: str) -> None:
    times = SEEDS if fixture == "simulated" else 1
    assert run.of(f"left_{fixture}.py::test_{test}") == ["PASSED", "ERROR"] * times
    assert any(line.startswith("E ") and line.endswith(found) for line in run.lines)


@pytest.mark.parametrize("fixture", ["simulated", "host"])
def test_no_left_object_is_no_error_and_a_failure_is_the_only_report(run: Run, fixture: str) -> None:
    times = SEEDS if fixture == "simulated" else 1
    assert run.of(f"left_{fixture}.py::test_nothing") == ["PASSED"] * times
    assert run.of(f"left_{fixture}.py::test_fails_for_another_reason") == ["FAILED"] * times


def test_rule_of_cuda_that_was_broken_is_an_error(run: Run) -> None:
    """The test gives memory to a stream that does not wait for its allocation, without the checks of aiocuda."""
    assert run.of("rule.py::test_two_streams") == ["PASSED", "ERROR"] * SEEDS
    assert any(line.startswith("E ") and "V11: stream " in line for line in run.lines)


def test_missing_plugin_for_coroutines_is_reported(forks: ForkingProcess, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(simulated_device): pass")
    run = Run(forks, tmp_path, "anyio", "-p", "no:anyio")
    assert run.of("it.py::test_it") == ["ERROR"]
    assert "simulated_device runs in an event loop: install pytest-asyncio, or mark the test anyio" in run.text
