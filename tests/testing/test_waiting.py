from __future__ import annotations

import threading

import numpy as np
import pytest

from aiocuda.testing.conformance._rig import Hold, unblocked, wait_until
from aiocuda.testing.kernels import HOLDING, RAN_OUT, RELEASED


def test_wait_until_returns_when_the_condition_holds() -> None:
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), "the third answer", 60)
    assert list(answers) == []


def test_wait_until_names_what_did_not_come() -> None:
    with pytest.raises(AssertionError, match=r"^a bus: not within 0 s$"):
        wait_until(lambda: False, "a bus", 0)


def test_unblocked_lets_a_quick_body_be() -> None:
    rescued: list[bool] = []
    with unblocked("nothing", 60, lambda: rescued.append(True)):
        pass
    assert rescued == []


@pytest.mark.slow
def test_unblocked_rescues_and_shows_the_stack() -> None:
    gate = threading.Event()
    with pytest.raises(AssertionError, match=r"(?s)^the gate blocked its caller for 0.3 s, here:.*gate\.wait\(60\)"):
        with unblocked("the gate", 0.3, gate.set):
            assert gate.wait(60)


def test_unblocked_keeps_the_bodys_own_failure() -> None:
    with pytest.raises(ZeroDivisionError), unblocked("the body", 60, lambda: None):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("state", "started", "running"), [(0, False, False), (HOLDING, True, True), (RELEASED, True, False)]
)
def test_hold_has_a_state(state: int, started: bool, running: bool) -> None:
    hold = Hold(np.array([state, 0], "u4"), 60)
    assert (hold.started, hold.running) == (started, running)


def test_hold_that_ran_out_is_no_hold() -> None:
    hold = Hold(np.array([RAN_OUT, 0], "u4"), 60)
    with pytest.raises(AssertionError, match="ended before it was released"):
        hold.wait_running()
    with pytest.raises(AssertionError, match="raise hold_seconds"):
        hold.release()


def test_hold_that_never_starts_is_found() -> None:
    with pytest.raises(AssertionError, match="a held kernel starts: not within 0 s"):
        Hold(np.zeros(2, "u4"), 0).wait_running()
