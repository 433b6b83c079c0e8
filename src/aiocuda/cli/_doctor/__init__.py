"""``aiocuda doctor``: checks this machine, and names the cure of each problem."""

from __future__ import annotations

from ._doctor import diagnose
from ._finding import as_json

__all__ = ["as_json", "diagnose"]
