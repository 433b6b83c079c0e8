"""The waits that tasks have declared: a closed event loop keeps none of them."""

from __future__ import annotations

import asyncio
import gc
import weakref

from aiocuda._base._deadlock import find_stuck, waiting


def test_a_closed_loop_keeps_no_task_alive() -> None:
    """P11: a task that waits in a closed loop is garbage-collected with everything that it holds."""

    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        with waiting("an event that never happens", future):
            await future

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # asyncio reports a task that is destroyed while it waits
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    assert [found.task for found in find_stuck(loop, patient=False)] == [task]
    gone = weakref.ref(task)
    loop.close()
    del task
    gc.collect()
    assert gone() is None
