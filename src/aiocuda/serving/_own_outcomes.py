"""The outcomes of a batch, without the memory of its slot."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import AiocudaError
from ..pipeline._result_copies import PLAIN, ResultCopies
from ._errors import BatchError
from ._results import is_failure, outcomes

__all__ = ["own_outcomes"]

#: Results that are looked at in one iteration of the loop: 1 µs each.
AT_ONCE = 256


async def own_outcomes(results: Any, size: int, copies: ResultCopies) -> tuple[list[Any], int]:
    """Return the outcomes of a batch, and of how many of them a part was copied.

    An array with an item for each request is copied as a whole. A result that cannot be copied fails its request.
    """
    if copies.is_array(results):
        is_shared = copies.find(results)
        if is_shared:
            await copies.make()
        return outcomes(copies.owned(results), size), size if is_shared else 0
    found = outcomes(results, size)
    shared = []
    for position, outcome in enumerate(found):
        if position % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        if type(outcome) in PLAIN or is_failure(outcome):
            continue
        try:
            if copies.find(outcome):
                shared.append(position)
        except Exception as error:  # noqa: BLE001 - the request gets it
            found[position] = _cannot_copy(error)
    if not shared:
        return found, 0
    await copies.make()
    return found, await _replace(found, shared, copies)


async def _replace(found: list[Any], positions: list[int], copies: ResultCopies) -> int:
    """Replace the outcomes at these positions by those with copies, and return how many have succeeded."""
    replaced = 0
    for number, position in enumerate(positions):
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        try:
            found[position] = copies.owned(found[position])
            replaced += 1
        except Exception as error:  # noqa: BLE001 - the request gets it
            found[position] = _cannot_copy(error)
    return replaced


def _cannot_copy(error: Exception) -> BatchError:
    """Return the error of a request with a result that cannot be copied."""
    failure = BatchError(str(error) if isinstance(error, AiocudaError) else f"a result cannot be copied: {error!r}")
    failure.__cause__ = error
    return failure
