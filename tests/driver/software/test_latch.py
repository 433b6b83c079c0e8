from __future__ import annotations

import pickle

from aiocuda.driver.software._core import FaultLatch


def test_first_fault_stays() -> None:
    latch = FaultLatch()
    assert latch.fault is None
    cause = ValueError("broken")
    first = latch.set(719, 1, "a kernel raised", cause)
    assert latch.set(700, 0, "illegal address") is first
    assert latch.fault is first
    assert (first.code, first.device, first.operation, first.__cause__) == (719, 1, None, cause)
    assert "device 1 has faulted: a kernel raised (CUDA error 719)" in str(first)


def test_first_blame_stays_and_is_in_the_text() -> None:
    latch = FaultLatch()
    latch.blame("nobody")
    cause = ValueError("broken")
    latch.set(700, 0, "illegal address", cause)
    latch.blame("upload 7")
    latch.blame("upload 8")
    assert latch.fault is not None
    assert latch.fault.operation == "upload 7"
    assert str(latch.fault).endswith("(first seen by upload 7)")
    assert latch.fault.__cause__ is cause


def test_fault_is_raised_again_as_an_equal_one() -> None:
    latch = FaultLatch()
    fault = latch.set(700, 0, "illegal address", ValueError("why"))
    again = fault.again()
    assert again is not fault
    assert (str(again), again.__dict__, again.__cause__) == (str(fault), fault.__dict__, fault.__cause__)
    assert pickle.loads(pickle.dumps(fault)).code == 700
