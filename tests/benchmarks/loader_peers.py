"""The loaders of others, each in the form that its documentation recommends. They were chosen before ours was measured.

PyTorch: worker processes, which are kept between epochs, ``pin_memory``, two batches ahead for each worker, and
``non_blocking`` copies on a side stream, so that a batch is copied while the step of the last one runs. A sample that
is a whole batch is delivered without collating (``batch_size=None``).

SPDL, from 0.8 on, in two forms. Both make the tensor of a batch at once, without one for each sample, in as many
threads as the others have workers, and call SPDL's own ``transfer_tensor_h2d`` on one thread of its own, with its
stream:

- ``spdl``: the threads are in this process, which SPDL recommends for decoders that release the GIL (MT);
- ``spdl-subprocess``: they are in a process of their own, which SPDL recommends for training on a GPU (MTP).
"""

from __future__ import annotations

import concurrent.futures
import importlib
from collections.abc import Iterator
from typing import Any

from .loader_cases import WORKERS, Case, DecodeBatch, Decoder, TorchSamples

__all__ = ["spdl_batches", "torch_batches"]


def torch_batches(case: Case, decoder: Decoder, count: int) -> Iterator[Any]:
    """Yield the batches of PyTorch's DataLoader, on the GPU."""
    torch: Any = importlib.import_module("torch")
    loader = torch.utils.data.DataLoader(
        TorchSamples(count * case.rows, decoder),
        batch_size=case.rows if case.rows > 1 else None,
        num_workers=WORKERS,
        pin_memory=True,
        persistent_workers=True,
        prefetch_factor=2,
    )
    steps, copies = torch.cuda.current_stream(), torch.cuda.Stream()
    for batch in loader:
        with torch.cuda.stream(copies):
            moved = batch.to("cuda", non_blocking=True)
        steps.wait_stream(copies)
        moved.record_stream(steps)
        yield moved


def spdl_batches(case: Case, decoder: Decoder, count: int, *, in_subprocess: bool) -> Iterator[Any]:
    """Yield the batches of SPDL, on the GPU."""
    pipelines: Any = importlib.import_module("spdl.pipeline")
    transfer = importlib.import_module("spdl.io").transfer_tensor_h2d
    loading = pipelines.PipelineBuilder().add_source(range(count * case.rows)).aggregate(case.rows)
    loading = loading.pipe(DecodeBatch(decoder), concurrency=WORKERS, output_order="input")
    threads = WORKERS
    if in_subprocess:
        config = loading.add_sink(WORKERS).get_config()
        batches = pipelines.run_pipeline_in_subprocess(config, num_threads=WORKERS, mp_context="forkserver")
        loading, threads = pipelines.PipelineBuilder().add_source(batches), 1
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as one_thread:
        pipeline = loading.pipe(transfer, executor=one_thread).add_sink(3).build(num_threads=threads)
        with pipeline.auto_stop():
            yield from pipeline
