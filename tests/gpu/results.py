"""The outcomes of all tests, their summary, and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

#: The parts of a run, in their order.
BESIDE, FEW, ALONE, AGAIN = "beside others", "beside few others", "alone", "again, alone"

#: The last lines of a failure that the summary shows; the JSON file has all of them.
_SHOWN = 30


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of one test."""

    part: str
    outcome: str  #: "passed", "failed", "skipped" or "xfailed"
    seconds: float
    reason: str = ""  #: one line
    text: str = ""  #: of a failure: its traceback and output


class Results:
    """The attempts of each test. They are written to a file, if there is one, whenever `save` is called."""

    def __init__(self, path: Path | None, **facts: Any) -> None:
        self._path = path
        self._facts = facts
        self._began = time.monotonic()
        self._attempts: dict[str, list[Attempt]] = {}
        self._seconds: dict[str, float] = {}  # of each part
        self.skipped: dict[str, str] = {}  #: why a test or a file was skipped
        self.complete = False  #: every part has ended

    def expect(self, test: str) -> None:
        """Note a test that is to run."""
        self._attempts[test] = []

    def add(self, test: str, attempt: Attempt) -> None:
        """Note one run of a test."""
        self._attempts.setdefault(test, []).append(attempt)
        if attempt.outcome == "skipped":
            self.skipped[test] = attempt.reason

    def replace(self, test: str, attempt: Attempt) -> None:
        """Note that the last run of a test has ended in another way."""
        self._attempts[test][-1] = attempt

    def end_part(self, part: str, seconds: float) -> str:
        """Note the time of a part, and return its line in the summary."""
        self._seconds[part] = seconds
        outcomes = self._outcomes(part)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items(), reverse=True))
        return f"{part + ':':<18} {sum(outcomes.values()):5} tests in {seconds:6.1f} s: {counts or 'none'}"

    def _outcomes(self, part: str) -> Counter[str]:
        return Counter(each.outcome for runs in self._attempts.values() for each in runs if each.part == part)

    @property
    def failed(self) -> list[str]:
        """The tests whose last run has failed."""
        return [test for test, runs in self._attempts.items() if runs and runs[-1].outcome == "failed"]

    @property
    def not_run(self) -> list[str]:
        return [test for test, runs in self._attempts.items() if not runs]

    def failed_once(self, part: str) -> list[str]:
        """Return the tests that failed in a part, and passed when they ran again alone."""
        return [
            test
            for test, runs in self._attempts.items()
            if len(runs) > 1 and (runs[0].part, runs[0].outcome) == (part, "failed") and runs[-1].outcome != "failed"
        ]

    def summary(self) -> str:
        """Return the failures with their texts, the skipped tests by their reasons, and the counts."""
        lines: list[str] = []
        for test in self.failed:
            lines += ["", f"{test}:", *self._attempts[test][-1].text.splitlines()[-_SHOWN:]]
        reasons = {test: runs[0].reason for test, runs in self._attempts.items() if runs}
        for name, tests in self._groups().items():
            lines += ["", f"{name}: {len(tests)}", *(f"  {test}: {reasons.get(test, '')}" for test in tests)]
        lines += ["", f"skipped, why: {len(self.skipped)}"]
        lines += [f"  {count} × {why}" for why, count in Counter(self.skipped.values()).most_common()]
        if not self.complete:
            lines += ["", f"INCOMPLETE: {len(self.not_run)} tests did not run"]
        return "\n".join([*lines, "", f"{len(self._attempts)} tests in {time.monotonic() - self._began:.0f} s"])

    def _groups(self) -> dict[str, list[str]]:
        return {
            "fails": self.failed,
            "fails only beside others": [*self.failed_once(BESIDE), *self.failed_once(FEW)],
            "fails only sometimes, alone": self.failed_once(ALONE),
        }

    def save(self) -> None:
        """Write the file. It is replaced as a whole, so it is complete at any time."""
        if self._path is None:
            return
        parts = {
            part: {"seconds": round(seconds, 1), **self._outcomes(part)} for part, seconds in self._seconds.items()
        }
        content = {
            **self._facts,
            "complete": self.complete,
            "seconds": round(time.monotonic() - self._began, 1),
            "parts": parts,
            **self._groups(),
            "skipped": self.skipped,
            "not run": self.not_run,
            "tests": {
                test: [
                    {name: value for name, value in dataclasses.asdict(each).items() if value != ""} for each in runs
                ]
                for test, runs in self._attempts.items()
            },
        }
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(content, indent=1), encoding="utf-8")
        new.replace(self._path)
