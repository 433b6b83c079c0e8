"""A device in Jupyter, with a loop that is always running: opened in one cell, used in others, closed in another."""

from __future__ import annotations

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = [
    """
    import asyncio
    import numpy as np
    import aiocuda
    device = await aiocuda.open_device(driver="host")
    left, right = device.stream(name="left"), device.stream(name="right")
    """,
    """
    twice = aiocuda.Kernel(
        "twice",
        source='extern "C" __global__ void twice(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }',
        host=lambda x, n: np.multiply(x, 2, out=x),
    )
    x = np.arange(10, dtype=np.float32)
    buffer = await left.upload(x)
    """,
    """
    pending = left.launch(twice, 1, 32, buffer, 10)   # not awaited in this cell
    right.wait(pending)
    """,
    """
    print((await right.download(buffer)).tolist())
    print(await pending, pending.done())
    """,
    """
    async def work(stream):
        for _ in range(100):
            stream.launch(twice, 1, 32, buffer, 1)
        await stream.synchronize()
    background = asyncio.create_task(work(left))
    """,
    """
    await background
    print(device.statistics().in_flight)
    """,
    """
    await device.aclose()
    print(device)
    try:
        left.synchronize()
    except aiocuda.ClosedError as error:
        print(type(error).__name__)
    """,
    """
    async with aiocuda.open_device(driver="host") as again:
        print((await again.stream().upload(x)).shape)
    """,
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*zmq.*", "ignore:unclosed:ResourceWarning")
def test_device_is_opened_used_and_closed_in_different_cells() -> None:
    import textwrap

    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in CELLS]
    )
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3")
    client.execute()
    printed = [
        "".join(output.text for output in cell.outputs if output.output_type == "stream") for cell in notebook.cells
    ]
    errors = [output for cell in notebook.cells for output in cell.outputs if output.output_type == "error"]
    assert not errors
    doubled = [float(2 * value) for value in range(10)]
    assert printed == [
        "",
        "",
        "",
        f"{doubled}\nNone True\n",
        "",
        "0\n",
        "<Device host:0 host 0 closed>\nClosedError\n",
        "(10,)\n",
    ]
