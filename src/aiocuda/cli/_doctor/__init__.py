"""``aiocuda doctor``: checks this machine, and names the cure of each problem."""

from __future__ import annotations

from ._doctor import diagnose
from ._finding import as_json
from ._screen import show_findings

__all__ = ["as_json", "diagnose", "show_findings"]
