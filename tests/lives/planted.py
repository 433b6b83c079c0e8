"""Planted bugs of `Scope`. They were chosen before its tests."""

from __future__ import annotations

from tests.planting import Bug

__all__ = ["BUGS"]

BUGS = [
    Bug(
        "second_returns",
        "A second `aclose` returns while the first one still runs.",
        "_scope.py",
        "            await asyncio.wait({end})  # if",
        "            pass  # if",
    ),
    Bug(
        "children_open",
        "A parent that is being closed does not refuse work in its children.",
        "_scope.py",
        "            scope.refuse(child)\n",
        "            pass\n",
        "tests/lives/test_scope.py",
    ),
    Bug(
        "release_lost",
        "A cancelled `aclose` gives nothing back.",
        "_scope.py",
        "        try:\n            if self._drain_seconds is None:\n",
        "        if cancelled:\n            raise cancelled[0]\n"
        "        try:\n            if self._drain_seconds is None:\n",
    ),
    Bug(
        "impatient",
        "A second cancellation ends the wait for the accepted work.",
        "_scope.py",
        "                cancelled.append(error)\n                self._begin_leaving(owner)\n",
        "                cancelled.append(error)\n                self._begin_leaving(owner)\n"
        "                if len(cancelled) > 1:\n                    break\n",
        "tests/lives/test_scope.py",
    ),
    Bug(
        "hurry_unheard",
        "If a task leaves an object that another task closes, that one goes on to wait without a limit.",
        "_scope.py",
        "            self._hurry.set_result(None)\n",
        "            pass\n",
        "tests/lives/test_scope.py",
    ),
]  # fmt: skip
