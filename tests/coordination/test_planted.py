"""Each planted bug of collectives is found by its test, and the unchanged collectives pass."""

from __future__ import annotations

from tests.coordination.planted import BUGS
from tests.planting import planted_tests

test_planted_bug_is_found, test_random_programs_break_no_rule = planted_tests(
    BUGS, package="coordination", simulation="tests.coordination.simulation", seeds=250, programs=60, soak=20_000
)
