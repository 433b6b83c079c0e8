"""`simulated_device`, its seeds, and what the fixtures say of a test that leaves something behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiocuda

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

#: What runs the tests, and what marks them so.
RUNNERS = {
    "strict": ("@pytest.mark.asyncio", ("--asyncio-mode=strict",)),
    "auto": ("", ("--asyncio-mode=auto",)),
    "anyio": ("@pytest.mark.anyio", ("-p", "no:asyncio")),
}

BEGINNING = """
import asyncio
import numpy as np
import pytest
import aiocuda
from aiocuda.testing import SimulatedDriver, SimulatedLoop, Upset

def loop():
    return asyncio.get_running_loop()
"""


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in another folder still finds the package."""
    monkeypatch.setenv("PYTHONPATH", str(Path(aiocuda.__file__).parents[1]))


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def run(pytester: pytest.Pytester, source: str, *arguments: str, runner: str = "strict") -> pytest.RunResult:
    mark, options = RUNNERS[runner]
    pytester.makepyfile(BEGINNING + source.replace("@marked", mark))
    if runner != "anyio":
        options = (*options, "-o", "asyncio_default_fixture_loop_scope=function")
    return pytester.runpytest_subprocess(
        "-p", "aiocuda.testing.plugin", "-W", "error", "-ra", "-v", *options, *arguments, timeout=50
    )


# Where it runs


def test_runs_in_virtual_time(pytester: pytest.Pytester, runner: str) -> None:
    source = """
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
    result = run(pytester, source, runner=runner)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_simulated?seed0? PASSED*", "*::test_other*PASSED*"])


def test_other_fixtures_live_in_the_same_loop(pytester: pytest.Pytester, runner: str) -> None:
    source = """
import pytest_asyncio

@(pytest.fixture if ANYIO else pytest_asyncio.fixture)
async def stream(simulated_device):
    async with simulated_device.stream() as stream:
        yield stream

@(pytest.fixture if ANYIO else pytest_asyncio.fixture)
async def buffer(stream):
    return await stream.upload(b"abc")

@marked
async def test_uses_them(stream, buffer):
    assert isinstance(loop(), SimulatedLoop)
    assert (await stream.download(buffer)).tobytes() == b"abc"
"""
    run(pytester, source.replace("ANYIO", str(runner == "anyio")), runner=runner).assert_outcomes(passed=1)


def test_backend_of_ones_own_gives_way(pytester: pytest.Pytester) -> None:
    source = """
@pytest.fixture
def anyio_backend():
    return "asyncio"

@marked
async def test_simulated(simulated_device):
    assert isinstance(loop(), SimulatedLoop)

@marked
async def test_other():
    assert not isinstance(loop(), SimulatedLoop)
"""
    run(pytester, source, runner="anyio").assert_outcomes(passed=2)


def test_loop_factories_of_ones_own_stay_for_other_tests(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
import asyncio

class Mine(asyncio.SelectorEventLoop):
    pass

def pytest_asyncio_loop_factories(config, item):
    return {"mine": Mine}
""")
    source = """
@marked
async def test_simulated(simulated_device):
    assert isinstance(loop(), SimulatedLoop)

@marked
async def test_other():
    assert type(loop()).__name__ == "Mine"
"""
    run(pytester, source).assert_outcomes(passed=2)


def test_device_of_a_session_serves_the_loops_of_its_tests(pytester: pytest.Pytester, runner: str) -> None:
    source = """
import pytest_asyncio

if ANYIO:
    @pytest.fixture(scope="session")
    def anyio_backend():
        return "asyncio", {"loop_factory": SimulatedLoop}

    shared = pytest.fixture(scope="session")
else:
    shared = pytest_asyncio.fixture(scope="session", loop_scope="session")

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
    run(pytester, source.replace("ANYIO", str(runner == "anyio")), runner=runner).assert_outcomes(passed=5)


def test_lost_wake_up_fails_the_test_at_once(pytester: pytest.Pytester, runner: str) -> None:
    source = """
@marked
async def test_waits_for_nobody(simulated_device):
    await asyncio.Event().wait()

@marked
async def test_next(simulated_device):
    await asyncio.sleep(1)
"""
    result = run(pytester, source, runner=runner)
    assert result.parseoutcomes()["failed"] == 1
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines(["*LostWakeupError: lost wake-up at * of virtual time: *"])


# Seeds

_RACE = """
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


def test_every_seed_is_a_test_and_a_failure_names_its_own(pytester: pytest.Pytester, runner: str) -> None:
    result = run(pytester, _RACE, "--aiocuda-seeds", "12", runner=runner)
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] + outcomes["failed"] == 12
    assert 2 <= outcomes["failed"] <= 10
    failed = {line.partition("[")[2].partition("]")[0] for line in result.outlines if line.startswith("FAILED ")}
    told = [line for line in result.outlines if line.startswith("seed ") and "the same again: pytest" in line]
    assert {f"seed{line.split(';')[0].split()[1]}" for line in told} == failed
    again = told[0].partition("the same again: pytest ")[2].replace('"', "").split()
    rerun = run(pytester, _RACE, *again, runner=runner)
    rerun.assert_outcomes(failed=1)


def test_seed_by_itself(pytester: pytest.Pytester) -> None:
    """For a test that makes its driver, and its chances, itself."""
    source = """
@marked
async def test_mine(aiocuda_seed):
    driver = SimulatedDriver(aiocuda_seed, upsets=[Upset("refuse", 1, "upload", 2)])
    async with aiocuda.open_device(driver=driver) as device, device.stream() as stream:
        with pytest.raises(aiocuda.DeviceOutOfMemory):
            await stream.upload(b"abc")
    driver.close()

def test_without_a_loop(aiocuda_seed):
    assert aiocuda_seed in range(3)
"""
    result = run(pytester, source, "--aiocuda-seeds", "3")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*test_mine?seed2? PASSED*", "*test_without_a_loop?seed1? PASSED*"])


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_number_of_seeds_is_checked(pytester: pytest.Pytester, number: str) -> None:
    result = run(pytester, "", f"--aiocuda-seeds={number}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--aiocuda-seeds: '{number}' is no number of seeds: at least 1"])


# What is left behind

_LEAVES = """
from tests_kernels import SPIN

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


@pytest.mark.parametrize("fixture", ["simulated_device", "aiocuda_device"])
def test_what_is_left_behind_is_an_error(pytester: pytest.Pytester, runner: str, fixture: str) -> None:
    pytester.makepyfile(
        tests_kernels="""
import aiocuda
from aiocuda.testing import kernels
SPIN = aiocuda.Kernel("spin", source=kernels.SPIN.source, host=kernels.SPIN.host)
"""
    )
    result = run(pytester, _LEAVES.replace("FIXTURE", fixture), runner=runner)
    result.assert_outcomes(passed=5, failed=1, errors=4)
    found = [line for line in result.outlines if line.endswith("the test left something behind on its device:")]
    assert len(found) == 4
    for line in (
        "E*1 unfinished operation: await them, or abandon them",
        "E*open streams (mine): use `async with device.stream() as stream`",
        "E*4 bytes of device memory and 0 of pinned memory: free those buffers, or drop them",
        "E*0 bytes of device memory and 4096 of pinned memory: free those buffers, or drop them",
    ):
        result.stdout.fnmatch_lines([line])


def test_rule_of_cuda_that_was_broken_is_an_error(pytester: pytest.Pytester, runner: str) -> None:
    """Behind the library's back: it gives a range to a stream that does not wait for its allocation."""
    source = """
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
    result = run(pytester, source, runner=runner)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the test broke a rule of CUDA:*", "*V11: stream * uses *"])


def test_without_a_plugin_for_coroutines_it_says_what_it_needs(pytester: pytest.Pytester) -> None:
    result = run(pytester, "def test_it(simulated_device): pass", "-p", "no:anyio", runner="anyio")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*simulated_device runs in an event loop: install pytest-asyncio, or mark the test*"])
