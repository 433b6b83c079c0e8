"""`gpus_of`: the GPU of each replica on one machine."""

from __future__ import annotations

import os

from ...errors import InvalidArgumentError

__all__ = ["VISIBLE", "check_same", "gpus_of"]

#: The variable by which CUDA hides GPUs from a process.
VISIBLE = "CUDA_VISIBLE_DEVICES"

_CURES = f"share GPUs with {VISIBLE}=0,0 (an entry for each replica), or use the host driver with AIOCUDA_DRIVER=host"


def gpus_of(replicas: int) -> list[str]:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` for each replica.

    Raises
    ------
    InvalidArgumentError
        The variable is set, and has fewer entries than there are replicas.
    """
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return [str(index) for index in range(replicas)]
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if not entries:
        return [""] * replicas  # all GPUs are hidden: the host driver
    if len(entries) < replicas:
        raise InvalidArgumentError(
            f"replicas={replicas}, but {VISIBLE}={visible} names {len(entries)}: use fewer replicas, or {_CURES}",
            argument="replicas",
        )
    return entries[:replicas]


def check_same(have_gpu: dict[int, bool]) -> None:
    """Raise `InvalidArgumentError` if some replicas have a GPU and others do not. Keys are the replicas' indices."""
    without = [index for index, has in have_gpu.items() if not has]
    if without and len(without) < len(have_gpu):
        raise InvalidArgumentError(
            f"replica {without[0]} has no GPU, and others have one: use fewer replicas, or {_CURES}",
            argument="replicas",
        )
