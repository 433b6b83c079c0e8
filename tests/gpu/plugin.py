"""A pytest plugin that writes the tests and their outcomes to a file, one JSON object per line.

``-p tests.gpu.plugin --gpu-report FILE`` loads it. Each line is written at once: a process that crashes has reported
which test was running.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Generator, Sequence
from typing import Any

import pytest

#: The marks of tests that run alone.
ALONE = ("alone", "alone_on_a_gpu")

#: The mark of tests that run beside few others.
FEW = "few_on_a_gpu"

#: How `aiocuda.testing.plugin` reports the skip of a GPU test, before the reason.
_SKIP = "must not skip. Skipped: "

#: The descriptor: until its end, pytest replaces `sys.stderr`.
_STDERR = 2

#: A text is cut to so many characters: its end has the error.
_MOST = 12_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FILE", required=True, help="where tests.gpu.plugin writes")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the stacks of all threads if the process then hangs, as pytest does for a test that hangs."""
    faulthandler.dump_traceback_later(float(config.getini("faulthandler_timeout")), file=_STDERR)


class Reporter:
    """Writes the lines."""

    def __init__(self, config: pytest.Config) -> None:
        self._file = open(config.getoption("gpu_report"), "a", encoding="utf-8", buffering=1)
        self._collects = bool(config.getoption("collectonly"))
        self._reports: list[pytest.TestReport] = []

    def _write(self, event: str, test: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, "test": test, **facts}) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that cannot be imported, or that skips itself."""
        if report.failed:
            self._write("error", report.nodeid, text=report.longreprtext[-_MOST:])
        elif report.skipped:
            self._write("skipped", report.nodeid, text=_reason(report.longrepr))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Report the tests that need more GPUs. `aiocuda.testing.plugin` deselects only these in one call."""
        needed = [_gpus(item) for item in items]
        if self._collects and min(needed, default=0) > 1:
            for item, count in zip(items, needed, strict=True):
                self._write("skipped", item.nodeid, text=f"needs {count} GPUs")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._collects:
            for item in session.items:
                self._write(
                    "found",
                    item.nodeid,
                    argument=f"{item.path}{item.nodeid[item.nodeid.index('::') :]}",
                    alone=any(item.get_closest_marker(mark) is not None for mark in ALONE),
                    few=item.get_closest_marker(FEW) is not None,
                    slow=item.get_closest_marker("slow") is not None,
                    limit=_limit(item),
                )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Report the begin and the end of a test, with the outcome of its three phases."""
        self._write("begins", item.nodeid, limit=_limit(item))
        self._reports.clear()
        result = yield
        by_mark = {mark.kwargs.get("reason") for mark in item.iter_markers("skipif")}
        outcome, text, reason = "passed", "", ""
        for report in self._reports:
            why = report.longreprtext.partition(_SKIP)[2]
            if report.skipped or why in by_mark or "could not import" in why:
                outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
                reason = why or _reason(report.longrepr)
            elif report.failed:
                shown = [report.longreprtext, *(f"{name}:\n{content}" for name, content in report.sections)]
                outcome, text, reason = "failed", text + "\n".join(shown), reason or _reason(report.longrepr)
        seconds = sum(report.duration for report in self._reports)
        self._write("ends", item.nodeid, outcome=outcome, seconds=seconds, reason=reason, text=text[-_MOST:])
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def _reason(longrepr: Any) -> str:
    """Return one line: why a test failed or was skipped."""
    crash = getattr(longrepr, "reprcrash", None)
    text = longrepr[2] if isinstance(longrepr, tuple) else getattr(crash, "message", None) or str(longrepr)
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:300] if lines else ""


def _gpus(item: pytest.Item) -> int:
    mark = item.get_closest_marker("gpu")
    return 0 if mark is None else int(mark.args[0] if mark.args else 1)


def _limit(item: pytest.Item) -> float | None:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None and mark.args else None
