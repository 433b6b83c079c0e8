"""Planted bugs of `Scope`. They were chosen before its tests."""

from __future__ import annotations

from tests.planting import Bug

__all__ = ["BUGS"]

BUGS = [
    Bug(
        "second_returns",
        "A second `aclose` returns while the first one still runs.",
        "_scope.py",
        "                await asyncio.wait({end.task})  # if",
        "                pass  # if",
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
        "_end.py",
        "            await owner._release(outcome)\n",
        "            if not scope.left:\n                await owner._release(outcome)\n",
    ),
    Bug(
        "impatient",
        "A second cancellation ends the wait for the accepted work.",
        "_end.py",
        "                    cancelled = caught\n",
        "                    if cancelled is not None and self._limit is not None:\n"
        "                        self._limit.reschedule(0.0)\n"
        "                    cancelled = caught\n",
        "tests/lives/test_scope.py",
    ),
    Bug(
        "hurry_unheard",
        "If a task leaves an object that another task closes, that one goes on to wait without a limit.",
        "_end.py",
        "                self._limit.reschedule(until)\n",
        "                pass\n",
        "tests/lives/test_scope.py",
    ),
]  # fmt: skip
