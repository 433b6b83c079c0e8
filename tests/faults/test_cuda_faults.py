"""A fault reaches every waiter (L3, P2, P3, P4). Each case is a process of its own: CUDA does not come back in it.

``python -m tests.faults`` runs the whole matrix, many times.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest

from aiocuda import CompilerNotFoundError
from tests.faults.fault_child import DURING
from tests.faults.fault_kernels import FAULTS, fault_kernel, spoil
from tests.faults.matrix import ALONE, BESIDE, Case, children, complaints, line


def check(cases: list[Case], driver: str, at_once: int, limit_ms: float) -> None:
    found: list[str] = []
    for told in children(cases, driver, at_once):
        assert told is not None
        print(line(told))  # noqa: T201 - both times are to be seen, not only their difference
        found += [f"{told['kind']} during {told['during']}: {each}" for each in complaints(told, driver, limit_ms)]
    assert found == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fault_reaches_every_operation() -> None:
    """Awaited before, during or after the fault, and not awaited. One process at a time, as the driver may not report
    two."""
    check(ALONE, "cuda", 1, 100)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fault_beside_other_work() -> None:
    """Each other work once, with another kind of fault each."""
    kinds = list(FAULTS)
    check([(kinds[number % len(kinds)], during) for number, during in enumerate(DURING[2:])], "cuda", 1, 100)


@pytest.mark.slow
def test_the_same_on_the_host_driver() -> None:
    """A host implementation that raises. How soon, is measured on a GPU: other programs use this machine, too."""
    check([("trap", during) for during in DURING], "host", 2, math.inf)


def test_matrix_is_whole() -> None:
    assert Counter(kind for kind, _ in BESIDE) == dict.fromkeys(FAULTS, 5)
    assert {kind for kind, _ in ALONE} == set(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_illegal_instruction_is_one_instruction(architecture: str) -> None:
    """No compiler produces this instruction: the child patches a compiled store, after the gate."""
    from aiocuda.driver.cuda._compiler import compile_cuda

    try:
        image, *_ = compile_cuda(fault_kernel("instruction").source, architecture)
    except CompilerNotFoundError as error:
        pytest.skip(str(error))
    changed = [at for at, (was, now) in enumerate(zip(image, spoil(image), strict=True)) if was != now]
    assert changed[-1] - changed[0] == 1
    assert changed[0] % 16 == 0
    with pytest.raises(ValueError, match="is not in the compiled kernel"):
        spoil(compile_cuda(fault_kernel("trap").source, architecture)[0])
