"""Trains a model, and writes a checkpoint every few steps. Started again after any kill, it ends with the same weights.

``python training.py`` is one rank; ``torchrun --standalone --nproc-per-node 2 training.py`` starts two. Each rank has a
GPU of its own, or all of them use the CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from aiocuda.data import DataLoader, Shuffle, sync_loader

SAMPLES, BATCH, EPOCHS, CHECKPOINT_EVERY = 960, 16, 2, 10
FIELDS = [((1, 16, 16), np.float32), ((), np.int64)]  # of one sample: an image and its label
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets them


def decode(index, out, *, rng):
    """Decode a sample into memory that the device reads: here a formula in place of an image file."""
    image, label = out
    image[...] = rng.normal(size=image.shape)  # random augmentation: `rng` is the same after a resume
    image[0, index % 8 * 2] += 2
    label[...] = index % 8


def save(path, step, model, optimizer, loader):
    """Replace the checkpoint in one step. All ranks call this after the same batch, and rank 0 writes the file."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    of_ranks = [{"loader": loader.state_dict(), "cpu": torch.get_rng_state(), "cuda": cuda}] * RANKS
    if RANKS > 1:
        dist.all_gather_object(of_ranks, of_ranks[0])
    if RANK == 0:
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": DataLoader.merge_state_dicts(of_rank["loader"] for of_rank in of_ranks),
            "random": of_ranks,
        }
        with open(f"{path}.new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, before it replaces the last one
        os.replace(f"{path}.new", path)


def resume(path, model, optimizer, loader):
    """Go on after the checkpoint. Return the number of steps before it."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    if len(saved["random"]) == RANKS:  # another number of ranks goes on, too, but with other random numbers
        torch.set_rng_state(saved["random"][RANK]["cpu"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["random"][RANK]["cuda"])
    return saved["step"]


def main(path, executor):
    has_gpu, index = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", index) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(place)
    if RANKS > 1:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a GPU computes the same bits in each run
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(RANK)  # each rank has its own dropout; all begin with the weights of rank 0
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 64, 8)
    ).to(place)
    trained = model if RANKS == 1 else nn.parallel.DistributedDataParallel(model)
    if RANKS > 1:  # it regroups the gradients after its first step, and then rounds their sums otherwise
        trained(torch.zeros(BATCH, 1, 16, 16, device=place)).sum().backward()  # so the first step is one on zeros
    optimizer = torch.optim.AdamW(model.parameters())
    with sync_loader(
        range(SAMPLES), fields=FIELDS, decode=decode, batch_size=BATCH, drop_last=True, workers=2, executor=executor,
        shuffle=Shuffle(seed=0), shard=(RANK, RANKS), driver="cuda" if has_gpu else "host",
        index=index if has_gpu else 0, output="torch",
    ) as loader:  # fmt: skip
        step = resume(path, model, optimizer, loader) if path.exists() else 0
        for epoch in range(loader.state_dict()["epoch"], EPOCHS):
            for images, labels in loader:  # the rest of this epoch
                loss = nn.functional.cross_entropy(trained(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % CHECKPOINT_EVERY == 0:
                    save(path, step, model, optimizer, loader)
                    if RANK == 0:
                        print(f"epoch {epoch}, step {step}: loss {loss.item():.2f}", flush=True)
        save(path, step, model, optimizer, loader)
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="training that goes on after a kill, with the same weights")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--executor", choices=("thread", "process"), default="thread", help="where samples are decoded")
    arguments = parser.parse_args()
    main(arguments.checkpoint, arguments.executor)
