"""`Finding`: the result of a check."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple, Self

__all__ = ["Finding", "Problem", "Result", "as_json"]


class Problem(NamedTuple):
    """A problem, and the command or the variable that solves it."""

    text: str
    cure: str


class Result(NamedTuple):
    """What a check returns: facts, and problems."""

    facts: Sequence[str]
    problems: Sequence[Problem] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. The fields, in this order, are the keys of the JSON."""

    name: str
    ok: bool
    detail: str
    cure: str  #: "" if it is ok

    @classmethod
    def of(cls, name: str, result: Result) -> Self:
        """Return the finding for the result of a check: its problems come before its facts."""
        problems = result.problems
        detail = "; ".join([*(problem.text for problem in problems), *result.facts])
        return cls(name, not problems, detail, "; ".join(dict.fromkeys(problem.cure for problem in problems)))


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as one JSON object in ASCII."""
    return json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2)
