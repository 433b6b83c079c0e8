from __future__ import annotations

import gc
import signal

import pytest

from aiocuda._core._form import form
from tests.helpers import device, latch, other, stream

__all__ = ["device", "latch", "other", "stream"]

# Without an installed aiocuda, only this line loads the plugin. An installed aiocuda has an entry point with the name
# of the module: pytest finds the plugin registered, and this line does nothing.
pytest_plugins = ["aiocuda.testing.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the project's short form of ``--aiocuda-require-gpu``."""
    parser.getgroup("aiocuda").addoption("--require-gpu", action="store_true", help="--aiocuda-require-gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Translate ``--require-gpu``, and restore the handler of Ctrl-C.

    A background job of a shell ignores Ctrl-C; tests and their children need it.
    """
    if config.getoption("require_gpu"):
        config.option.aiocuda_require_gpu = True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if form().missing is not None:  # a checkout is not always compiled: `test_form.py` tests the warning
        config.addinivalue_line("filterwarnings", "ignore:.*so it runs in Python:aiocuda.errors.PerformanceWarning")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Translate the project's mark ``gpu`` into the plugin's ``aiocuda_gpu``.

    The shipped conformance suite has no mark of this project, so its slow tests are marked here.
    """
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        item.add_marker(pytest.mark.aiocuda_gpu(*marker.args, **marker.kwargs))
    if item.get_closest_marker("python_core") is not None and form().name == "compiled":
        item.add_marker(pytest.mark.skip(reason="AIOCUDA_CORE=python runs it"))
    if isinstance(item, pytest.Function) and item.function.__qualname__.startswith("OverlapConformance."):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the soak tests, unless ``-m`` names them."""
    if "soak" not in config.getoption("markexpr", ""):
        soak = [item for item in items if item.get_closest_marker("soak") is not None]
        if soak:
            config.hook.pytest_deselected(items=soak)
            items[:] = [item for item in items if item.get_closest_marker("soak") is None]


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collections: many tests make some, and each took a third of a second."""
    gc.collect()
    gc.freeze()
