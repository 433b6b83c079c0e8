"""The pytest plugin: a mark, two options, and the fixtures of `aiocuda.testing.fixtures`.

==============================  ========================================================================
``aiocuda_gpu``                 The test needs a GPU. Without one it is skipped.
``aiocuda_gpu(n)``              The test needs ``n`` GPUs. It is deselected where there are fewer, and
                                skipped where there is none.
``--aiocuda-require-gpu``       A missing GPU is an error, and so is a skip of a test marked
                                ``aiocuda_gpu``.
``--aiocuda-seeds N``           Run each test of `simulated_device`, and each test that uses
                                `aiocuda_seed`, with N seeds.
==============================  ========================================================================

pytest loads this plugin in every environment in which aiocuda is installed. The plugin therefore changes only tests
that use one of these names, and it imports nothing that pytest has not imported itself.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Generator

import pytest

# The assertions of the conformance suite are explained like those of a test module.
pytest.register_assert_rewrite("aiocuda.testing.conformance")


@dataclasses.dataclass(frozen=True, slots=True)
class Gpus:
    """The number of GPUs that CUDA reports."""

    count: int
    reason: str = ""  #: why there is no GPU


#: The GPUs of this run. The plugin counts them when the first test needs one; a conftest may set this earlier.
GPUS = pytest.StashKey[Gpus]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aiocuda")
    group.addoption(
        "--aiocuda-require-gpu",
        action="store_true",
        help="fail if there is no GPU, and if a test marked aiocuda_gpu is skipped",
    )
    group.addoption(
        "--aiocuda-seeds",
        type=_count,
        default=1,
        metavar="N",
        help="run each test of the simulated driver with N seeds (default: 1)",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seeds, at least 1")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    """Add the mark and the fixtures."""
    config.addinivalue_line("markers", "aiocuda_gpu(count=1): needs that many NVIDIA GPUs; skipped if there is none")
    from . import fixtures  # imported late: now pytest-asyncio is loaded, if this run uses it

    config.pluginmanager.register(fixtures, fixtures.__name__)


@pytest.hookimpl(trylast=True)  # after -m and -k have selected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need more GPUs than there are."""
    if config.getoption("aiocuda_require_gpu") and _count_gpus(config).count == 0:
        raise pytest.UsageError(f"a GPU is required: {_count_gpus(config).reason}")
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        needed = _gpus_needed(item)
        too_few = needed > 1 and 0 < _count_gpus(config).count < needed
        (dropped if too_few else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU if there is none.

    The skip is raised here and is not a mark, so that pytest's summary has one line for all these tests.
    """
    if _gpus_needed(item) and _count_gpus(item.config).count == 0:
        pytest.skip(f"needs a GPU: {_count_gpus(item.config).reason}")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: after pytest has marked expected failures
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a GPU test into a failure if a GPU is required, and add the seed to a failure's report."""
    report = yield
    if report.when == "call":
        from .fixtures import PASSED

        item.stash[PASSED] = report.passed
    seed = getattr(getattr(item, "callspec", None), "params", {}).get("aiocuda_seed")
    if report.failed and seed is not None:
        again = f'pytest "{item.nodeid}" --aiocuda-seeds {seed + 1}'
        report.sections.append(("aiocuda", f"seed {seed}; the same again: {again}"))
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and item.config.getoption("aiocuda_require_gpu")
        and _gpus_needed(item)
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a GPU is required, and a test marked aiocuda_gpu must not skip. {reason}"
    return report


def _gpus_needed(item: pytest.Item) -> int:
    marker = item.get_closest_marker("aiocuda_gpu")
    if marker is None:
        return 0
    count = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
    if type(count) is not int or count < 1:
        raise pytest.UsageError(f"{item.nodeid}: aiocuda_gpu({count!r}) is not a number of GPUs, at least 1")
    return count


def _count_gpus(config: pytest.Config) -> Gpus:
    """Return the number of GPUs. CUDA is queried once per run, when the first test needs a GPU."""
    found = config.stash.get(GPUS, None)
    if found is None:
        from ..driver.cuda import CudaDriver, find
        from ..errors import AiocudaError

        try:
            reason = find()
            found = Gpus(0, reason) if reason is not None else Gpus(CudaDriver.get().device_count())
        except AiocudaError as error:
            raise pytest.UsageError(f"there is a GPU, and CUDA fails: {error}") from error
        config.stash[GPUS] = found
    return found
