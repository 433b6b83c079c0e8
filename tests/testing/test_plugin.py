from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiocuda
from tests.project.forked import ForkingProcess, forking_pytest
from tests.project.tree import ROOT

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run in another folder find the package."""
    monkeypatch.setenv("PYTHONPATH", str(Path(aiocuda.__file__).parents[1]))


#: A plugin that sets the number of GPUs, so that these tests give the same result on every machine.
_GPUS = """
from aiocuda.testing.plugin import GPUS, Gpus

def pytest_configure(config):
    config.stash[GPUS] = Gpus({count}, "the test has no NVIDIA driver")
"""


def _run(pytester: pytest.Pytester, gpus: int | None, source: str, *arguments: str) -> pytest.RunResult:
    """Run `source` in this process with that many GPUs, or without the plugin (None)."""
    plugins: tuple[str, ...] = ()
    if gpus is not None:
        pytester.makepyfile(gpus_of_the_test=_GPUS.format(count=gpus))
        plugins = ("-p", "aiocuda.testing.plugin", "-p", "gpus_of_the_test")
    pytester.makepyfile(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # saves 0.7 s; these tests need no other plugin
        patch.syspath_prepend(pytester.path)
        return pytester.runpytest_inprocess(*plugins, "--strict-markers", "-ra", *arguments)


def _run_apart(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    """Run `source` in a process of its own."""
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("-p", "aiocuda.testing.plugin", "-W", "error", "-ra", *arguments, timeout=60)


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkingProcess]:
    """A process that forks for each run of pytest."""
    with contextlib.closing(forking_pytest()) as process:
        yield process


def _run_in_a_fork(
    forks: ForkingProcess, pytester: pytest.Pytester, source: str, *arguments: str, **variables: str
) -> pytest.RunResult:
    """Run `source` in a process that has imported aiocuda: its start takes less time."""
    pytester.makepyfile(source)
    finished = forks.run(["-W", "error", "-ra", *arguments], pytester.path, variables)
    return pytest.RunResult(finished.status, finished.output.splitlines(), finished.errors.splitlines(), 0.0)


#: Without it pytest-asyncio warns.
_SCOPED = ("-o", "asyncio_default_fixture_loop_scope=function")


_ONE_OF_EACH = """
    import pytest

    @pytest.mark.aiocuda_gpu
    def test_gpu():
        pass

    def test_cpu():
        pass
"""


def test_gpu_tests_are_skipped_where_there_is_none(pytester: pytest.Pytester) -> None:
    result = _run(pytester, 0, _ONE_OF_EACH)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*needs a GPU: the test has no NVIDIA driver"])


def test_fixtures_of_a_skipped_test_are_not_made(pytester: pytest.Pytester) -> None:
    source = """
        import pytest

        @pytest.fixture
        def gpu():
            raise AssertionError("there is none")

        @pytest.mark.aiocuda_gpu
        def test_gpu(gpu):
            pass
    """
    _run(pytester, 0, source).assert_outcomes(skipped=1)


def test_gpu_tests_run_where_there_is_one(pytester: pytest.Pytester) -> None:
    _run(pytester, 1, _ONE_OF_EACH).assert_outcomes(passed=2)


def test_required_gpu_that_is_missing_is_an_error(pytester: pytest.Pytester) -> None:
    result = _run(pytester, 0, _ONE_OF_EACH, "--aiocuda-require-gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: a GPU is required: the test has no NVIDIA driver"])


def test_required_gpu_is_missed_also_by_a_run_without_gpu_tests(pytester: pytest.Pytester) -> None:
    result = _run(pytester, 0, "def test_cpu(): pass", "--aiocuda-require-gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


_SKIPS = """
    import pytest

    @pytest.mark.aiocuda_gpu
    def test_skips_itself():
        pytest.skip("not today")

    @pytest.mark.aiocuda_gpu
    @pytest.mark.skip(reason="not today either")
    def test_is_marked():
        pass

    @pytest.mark.aiocuda_gpu
    @pytest.mark.xfail(reason="known", strict=True)
    def test_is_expected_to_fail():
        assert False

    def test_without_gpu():
        pytest.skip("may well be")
"""


def test_skip_in_a_gpu_test_is_a_failure_if_gpus_are_required(pytester: pytest.Pytester) -> None:
    result = _run(pytester, 1, _SKIPS, "--aiocuda-require-gpu")
    # A mark's skip is one of the set-up: pytest calls its failure an error.
    result.assert_outcomes(failed=1, errors=1, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["*must not skip. Skipped: not today either", "*must not skip. Skipped: not today"])


def test_skip_in_a_gpu_test_is_a_skip_otherwise(pytester: pytest.Pytester) -> None:
    _run(pytester, 1, _SKIPS).assert_outcomes(skipped=3, xfailed=1)


@pytest.mark.parametrize(("gpus", "outcomes"), [(1, {"deselected": 2}), (2, {"passed": 1, "deselected": 1})])
def test_tests_that_need_more_gpus_than_there_are_are_deselected(
    pytester: pytest.Pytester, gpus: int, outcomes: dict[str, int]
) -> None:
    source = """
        import pytest

        @pytest.mark.aiocuda_gpu(2)
        def test_two():
            pass

        @pytest.mark.aiocuda_gpu(count=3)
        def test_three():
            pass
    """
    _run(pytester, gpus, source, "--aiocuda-require-gpu").assert_outcomes(**outcomes)


@pytest.mark.parametrize("count", ["'a100'", "0", "1.5", "True"])
def test_mark_with_a_bad_number_is_a_usage_error(pytester: pytest.Pytester, count: str) -> None:
    source = f"import pytest\n\n@pytest.mark.aiocuda_gpu({count})\ndef test_gpu(): pass"
    result = _run(pytester, 0, source)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *::test_gpu: aiocuda_gpu({count}) is not a number of GPUs, at least 1"])


#: A project that has its own marks, fixtures and option under the names that aiocuda's own tests use.
_FOREIGN_CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--require-gpu", choices=["a100", "h100"], default="a100")

def pytest_configure(config):
    for mark in ("gpu(kind)", "heavy", "slow", "soak"):
        config.addinivalue_line("markers", mark)

@pytest.fixture
def simulated_driver():
    return "a driver of this project"

@pytest.fixture
def simulated_device(simulated_driver):
    return simulated_driver.replace("driver", "device")
"""

_FOREIGN = """
import pytest

@pytest.mark.gpu("a100")
def test_kind(request):
    assert request.config.getoption("--require-gpu") == "h100"

@pytest.mark.gpu(3)
def test_number():
    pass

@pytest.mark.gpu
@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.soak
def test_long():
    pass

def test_fixtures(simulated_driver, simulated_device):
    assert simulated_device == "a device of this project"
"""


def test_plugin_leaves_marks_options_and_fixtures_of_other_projects_alone(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_FOREIGN_CONFTEST)
    for gpus in (None, 0, 1):
        _run(pytester, gpus, _FOREIGN, "--require-gpu", "h100").assert_outcomes(passed=4, skipped=1)


def test_plugin_registers_only_its_own_mark(pytester: pytest.Pytester) -> None:
    def marks(gpus: int | None) -> set[str]:
        lines = _run(pytester, gpus, "", "--markers").outlines
        return {line for line in lines if line.startswith("@pytest.mark.")}

    (added,) = marks(1) - marks(None)
    assert added.startswith("@pytest.mark.aiocuda_gpu(count=1): ")


def _run_project(pytester: pytest.Pytester, gpus: int, source: str, *arguments: str) -> pytest.RunResult:
    """Run `source` with this project's conftest."""
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    marks = "-o", "markers=gpu\nslow\nheavy\nsoak"
    return _run(pytester, gpus, source, *marks, *arguments)


def test_this_projects_mark_gpu_is_the_plugins(pytester: pytest.Pytester) -> None:
    source = _ONE_OF_EACH.replace("aiocuda_gpu", "gpu(2)")
    _run_project(pytester, 0, source).assert_outcomes(passed=1, skipped=1)
    _run_project(pytester, 1, source).assert_outcomes(passed=1, deselected=1)
    _run_project(pytester, 2, source).assert_outcomes(passed=2)
    _run_project(pytester, 2, source, "-m", "gpu").assert_outcomes(passed=1, deselected=1)


def test_this_projects_option_requires_a_gpu(pytester: pytest.Pytester) -> None:
    source = _SKIPS.replace("aiocuda_gpu", "gpu")
    _run_project(pytester, 1, source, "--require-gpu").assert_outcomes(failed=1, errors=1, xfailed=1, skipped=1)
    assert _run_project(pytester, 0, source, "--require-gpu").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("arguments", "passed", "deselected"),
    [((), 1, 1), (("-m", "soak"), 1, 1), (("-m", "soak or not soak"), 2, 0)],
    ids=["by default", "asked for", "all"],
)
def test_soak_tests_of_this_project_run_only_on_request(
    pytester: pytest.Pytester, arguments: tuple[str, ...], passed: int, deselected: int
) -> None:
    source = """
        import pytest

        @pytest.mark.soak
        def test_long():
            pass

        def test_short():
            pass
    """
    _run_project(pytester, 0, source, *arguments).assert_outcomes(passed=passed, deselected=deselected)


_DRIVERS = """
    import pytest

    GPU = pytest.param("cuda", marks=pytest.mark.gpu)

    @pytest.fixture(params=["host", GPU])
    def driver(request):
        return request.param

    def test_fixture(driver):
        pass

    PAIRS = [("host", 1), pytest.param("cuda", 2, marks=pytest.mark.gpu)]

    @pytest.mark.parametrize(("driver", "count"), PAIRS, ids=["h", "c"])
    def test_mark(driver, count):
        pass

    @pytest.mark.parametrize("name", [GPU])
    def test_gpu_only(name):
        pass
"""

_HOST = {"test_fixture[host]", "test_mark[h]", "test_gpu_only[cuda]"}
_CUDA = {"test_fixture[cuda]", "test_mark[c]"}


@pytest.mark.parametrize(
    ("libcuda", "arguments", "collected"),
    [(False, (), _HOST), (True, (), _HOST | _CUDA), (False, ("-m", "gpu"), _CUDA | {"test_gpu_only[cuda]"})],
    ids=["no driver", "driver", "gpu named"],
)
def test_parameters_of_this_project_that_need_a_gpu_are_left_out_without_a_driver(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    libcuda: bool,
    arguments: tuple[str, ...],
    collected: set[str],
) -> None:
    def load(name: str) -> None:
        if not libcuda:
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    result = _run_project(pytester, 0, _DRIVERS, "--collect-only", "-q", *arguments)
    assert {line.rpartition("::")[2] for line in result.outlines if "::" in line} == collected


@pytest.mark.slow
def test_cuda_is_not_asked_without_need(pytester: pytest.Pytester) -> None:
    source = """
        import sys

        def test_cpu():
            assert "aiocuda.driver.cuda._probe" not in sys.modules
    """
    _run_apart(pytester, source, *_SCOPED).assert_outcomes(passed=1)


@pytest.mark.slow
def test_hidden_gpus_are_no_gpus(pytester: pytest.Pytester, forks: ForkingProcess) -> None:
    result = _run_in_a_fork(forks, pytester, _ONE_OF_EACH, *_SCOPED, CUDA_VISIBLE_DEVICES="")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*needs a GPU: *"])


@pytest.mark.slow
def test_plugin_imports_nothing_but_itself() -> None:
    program = """
import sys
import aiocuda, pytest
before = set(sys.modules)
import aiocuda.testing.plugin
print(*sorted(set(sys.modules) - before))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["aiocuda.testing", "aiocuda.testing.plugin"]


_OPENS = """
    import pytest

    @pytest.mark.{runner}
    async def test_device(aiocuda_device):
        assert aiocuda_device.driver.name == "host"
        async with aiocuda_device.stream() as stream:
            assert (await stream.download(await stream.upload(b"abc"))).tobytes() == b"abc"

    @pytest.mark.{runner}
    async def test_latch(aiocuda_device, aiocuda_latch):
        async with aiocuda_device.stream() as stream:
            operation = aiocuda_latch.hold(stream)
            await aiocuda_latch.held()
            assert not operation.done()
            aiocuda_latch.release()

    @pytest.fixture
    def anyio_backend():
        return "asyncio"
"""


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["asyncio", "anyio"])
def test_device_and_latch_live_in_the_tests_loop(pytester: pytest.Pytester, forks: ForkingProcess, runner: str) -> None:
    _run_in_a_fork(forks, pytester, _OPENS.format(runner=runner), *_SCOPED).assert_outcomes(passed=2)


@pytest.mark.slow
def test_fixtures_report_missing_plugins(pytester: pytest.Pytester, forks: ForkingProcess) -> None:
    result = _run_in_a_fork(forks, pytester, "def test_device(aiocuda_device): pass", "-p", "no:asyncio")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*aiocuda_device runs in an event loop: install pytest-asyncio, or mark the test anyio*"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["asyncio", "anyio"])
def test_guard_fails_a_test_with_a_blocked_loop(pytester: pytest.Pytester, forks: ForkingProcess, runner: str) -> None:
    # A port without a descriptor calls `wake`; this one does not come back, and so aiocuda blocks the loop.
    source = """
        import gc
        import queue
        import pytest
        from aiocuda.driver._port import open_port
        from aiocuda.testing._blocking import LoopGuard

        @pytest.mark.{runner}
        async def test_blocks(aiocuda_no_blocking):
            port = open_port(wake, watchable=False)
            port.put(1)
            port.close()

        @pytest.mark.{runner}
        async def test_does_not(aiocuda_no_blocking):
            pass

        def wake():
            (guard,) = (each for each in gc.get_objects() if isinstance(each, LoopGuard))
            while not guard.stalls:
                with pytest.raises(queue.Empty):
                    queue.SimpleQueue().get(timeout=0.05)

        @pytest.fixture
        def anyio_backend():
            return "asyncio"
    """
    result = _run_in_a_fork(forks, pytester, source.format(runner=runner), *_SCOPED)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*a call of aiocuda blocked the event loop:*", "*in put*"])
