"""Which task waits for what: what of that outlives a loop."""

from __future__ import annotations

import asyncio
import gc
import weakref

from aiocuda._deadlock import find_stuck, waiting


def test_a_loop_that_is_closed_leaves_nobody_behind() -> None:
    """P11: who waits there goes with it, and with all that he holds."""

    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        with waiting("what never comes", future):
            await future

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # asyncio tells of a task that is destroyed while it waits
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    assert [found.task for found in find_stuck(loop, patient=False)] == [task]
    gone = weakref.ref(task)
    loop.close()
    del task
    gc.collect()
    assert gone() is None
