"""The pytest plugin: markers, options, and the fixtures of `aiocuda.testing.fixtures`.

======================  ================================================================================
``gpu``, ``gpu(n)``     needs a GPU, or ``n``. Without any it is skipped; a test that needs more than
                        there are is deselected
``slow``                takes more than 0.25 s
``soak``                runs for minutes; only with ``-m soak``
``--require-gpu``       no GPU is an error, and a skip inside a ``gpu`` test is a failure
``--aiocuda-seeds N``   run tests of `simulated_device`, and of `aiocuda_seed`, with N seeds each
======================  ================================================================================

pytest imports this module in every run, whatever is tested: it brings nothing that pytest has not loaded itself.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Generator

import pytest

# The suite's assertions explain themselves as those of a test module do.
pytest.register_assert_rewrite("aiocuda.testing.conformance")

_MARKERS = (
    "gpu(count=1): needs that many NVIDIA GPUs; skipped where there is none",
    "slow: takes more than 0.25 s",
    "soak: runs for minutes; only with -m soak",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Gpus:
    """What CUDA answered."""

    count: int
    reason: str = ""  #: why there is none


#: What is known of this run's GPUs. Filled when a test needs to know; a conftest may fill it sooner.
GPUS = pytest.StashKey[Gpus]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("aiocuda")
    group.addoption(
        "--require-gpu",
        action="store_true",
        help="fail where there is no GPU, and where a gpu test skips itself",
    )
    group.addoption(
        "--aiocuda-seeds",
        type=_count,
        default=1,
        metavar="N",
        help="run each test of the simulated driver with so many seeds (1)",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seeds: at least 1")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    """Add the markers and the fixtures."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    from . import fixtures, virtual  # not sooner: by now pytest-asyncio has been loaded, if this run has it

    for module in (fixtures, virtual):
        config.pluginmanager.register(module, module.__name__)


@pytest.hookimpl(trylast=True)  # what ``-m`` and ``-k`` leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, or was not asked for."""
    require = bool(config.getoption("require_gpu"))
    soak = "soak" in config.getoption("markexpr", "")
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    if require and _count_gpus(config).count == 0:
        raise pytest.UsageError(f"--require-gpu: {_count_gpus(config).reason}")
    for item in items:
        needed = _gpus_needed(item)
        too_many = needed > 1 and 0 < _count_gpus(config).count < needed
        unasked = not soak and item.get_closest_marker("soak") is not None
        (dropped if too_many or unasked else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none. Skipped here and not by a mark, the report has one line for all."""
    if _gpus_needed(item) and _count_gpus(item.config).count == 0:
        pytest.skip(f"needs a GPU: {_count_gpus(item.config).reason}")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: after pytest itself has told a skip from an expected failure
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under ``--require-gpu`` a gpu test that skips itself has failed. A failure names its seed."""
    report = yield
    if report.when == "call":
        from .fixtures import PASSED

        item.stash[PASSED] = report.passed
    seed = getattr(item, "callspec", None) and item.callspec.params.get("aiocuda_seed")  # type: ignore[attr-defined]
    if report.failed and seed is not None:
        again = f'pytest "{item.nodeid}" --aiocuda-seeds {seed + 1}'
        report.sections.append(("aiocuda", f"seed {seed}; the same again: {again}"))
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and item.config.getoption("require_gpu")
        and _gpus_needed(item)
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: a gpu test must not skip. {reason}"
    return report


def _gpus_needed(item: pytest.Item) -> int:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return 0
    return int(marker.args[0] if marker.args else marker.kwargs.get("count", 1))


def _count_gpus(config: pytest.Config) -> Gpus:
    """How many GPUs there are. CUDA is asked once a run, and not before a test needs to know."""
    found = config.stash.get(GPUS, None)
    if found is None:
        from ..driver.cuda.driver import CudaDriver
        from ..driver.cuda.probe import find
        from ..errors import AiocudaError

        try:
            reason = find()
            found = Gpus(0, reason) if reason is not None else Gpus(CudaDriver.get().device_count())
        except AiocudaError as error:
            raise pytest.UsageError(f"there is a GPU, and CUDA fails: {error}") from error
        config.stash[GPUS] = found
    return found
