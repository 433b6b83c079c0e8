"""``aiocuda doctor``: checks this machine, and names the cure of each problem.

Files
    `_finding`          the result of a check
    `_machine`          what the driver and its device answer
    `_driver_checks`    checks of driver, versions, compiler, hardware queues and pinned memory
    `_settings_checks`  checks of the kernel cache, the environment variables and the event loop
    `_time_checks`      measures waits for the GIL, and how late timers are
    `_doctor`           runs all checks
    `_screen`           the findings in the terminal
"""

from __future__ import annotations

from ._doctor import diagnose
from ._finding import as_json
from ._screen import show_findings

__all__ = ["as_json", "diagnose", "show_findings"]
