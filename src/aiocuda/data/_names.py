"""Names that programs look for on loaders and batches: those of other libraries. `lacks` decorates the classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from .._base import _mistakes
from .._base._names import each_name

__all__ = ["LOADER_CURES", "lacks"]

C = TypeVar("C", bound=type[Any])

_ARRAY = (
    "shape dtype size ndim T numpy cpu copy_to_host to_host item tolist tobytes astype reshape sum mean max min prod "
    "std var argmax argmin all any to cuda float half long permute view dim device pin_memory"
)

_LOADER = {
    "set_epoch reset": "loader.epoch(1) has the batches of epoch 1; each loop over it is the next epoch",
    "dataset sampler batch_size num_workers batch_sampler collate_fn drop_last executor fields prefetch shard shuffle "
    "source workers": "the program has what it gave to the loader; len(loader) counts batches",
    "num_batches": "len(loader) is the number of batches",
    "stats metrics": "loader.statistics() has the figures",
    "bottleneck": "loader.advice() names it",
    "state get_state": "loader.state_dict() returns the state",
    "load_state set_state": "loader.load_state_dict(state)",
}

#: For each class: names, separated by spaces, and what to use in their place.
_CURES: Final[Mapping[str, Mapping[str, str]]] = {
    "DataLoader": {
        **_LOADER,
        "close shutdown stop": "`await loader.aclose()` closes it, as the end of `async with` does",
    },
    "FieldMapping": {
        _ARRAY: "a batch is a mapping of arrays: `for (x,) in loader` unpacks those with one field, and batch[field] "
        "is an array",
        "x y data target targets image images label labels input inputs": "batch[field] is an array, by the name of "
        "the field, or by its place: 0, 1, …",
        "batch_size": "len(batch.indices) is the number of its samples",
        "clone": "batch.keep() keeps it after the next request",
    },
    "LoaderAdvice": {
        "num_workers": "it is called workers",
        "prefetch_factor": "it is called prefetch",
        "bottleneck reason reasons": "it is called why",
    },
    "Shuffle": {"set_epoch": "loader.epoch(1) has the batches of epoch 1; each loop over a loader is the next epoch"},
    "SyncArray": {
        "cpu cuda numpy float half long to permute view reshape size dim device item tolist get asnumpy copy_to_host "
        "sum mean max min astype ndim numel T torch": "torch.from_dlpack(array) is a tensor of it, as each array with "
        "output='torch'; array.to_host() is NumPy's",
    },
    "SyncBatch": {
        "stream": "aiocuda's streams are for event loops; batch.used_on(stream) names one of another library",
    },
    "SyncBatches": {
        **_LOADER,
        "shutdown stop": "loader.close() closes it, as the end of `with` does",
        "merge_state_dicts": "aiocuda.data.DataLoader.merge_state_dicts(states)",
    },
    "TensorBatch": {"stream": "its tensors are on the stream of PyTorch that was current when it was requested"},
}

#: For each class: each name that it lacks, and what to use in its place.
LOADER_CURES: Final = each_name(_CURES)


def lacks(cls: C) -> C:
    """Decorate a class of this package: see `lacks` of `aiocuda._base._mistakes`."""
    return _mistakes.lacks(cls, LOADER_CURES[cls.__name__])
