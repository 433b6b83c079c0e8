from __future__ import annotations

import signal

from tests.helpers import device, latch, other, stream

__all__ = ["device", "latch", "other", "stream"]

# Uninstalled, nobody else loads the plugin. Installed, its entry point has: it bears the module's own name, so that
# pytest finds it registered and this line does nothing.
pytest_plugins = ["aiocuda.testing.plugin"]


def pytest_configure() -> None:
    """Ctrl-C is tested, here and in child processes; a shell's background job starts with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
