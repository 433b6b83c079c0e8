"""Every row of the contract's table of bad input has a test."""

from __future__ import annotations

import re

from tests.bad_input import test_settings
from tests.bad_input.elsewhere import ELSEWHERE
from tests.bad_input.test_refused import CASES

#: Nothing here reads traces or settings from files (73), and nothing listens (74).
OPEN = {73, 74}


def test_every_row_has_a_test() -> None:
    numbers = (re.findall(r"(?<=_)\d+(?=_)", name) for name in vars(test_settings) if name.startswith("test_row_"))
    set_up = {int(number) for each in numbers for number in each}
    rows = {case.row for case in CASES} | set_up | set(ELSEWHERE)
    assert rows == set(range(1, 88)) - OPEN


def test_no_two_cases_have_one_name() -> None:
    names = [str(case) for case in CASES]
    assert sorted({name for name in names if names.count(name) > 1}) == []
