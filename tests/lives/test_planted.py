"""Each planted bug of `Scope` is found by its test, and random programs that end objects break no rule."""

from __future__ import annotations

from tests.lives.planted import BUGS
from tests.planting import planted_tests

test_planted_bug_is_found, test_random_programs_break_no_rule = planted_tests(
    BUGS, package="_base", simulation="tests.lives.simulation", seeds=300, programs=30, soak=10_000
)
