"""LoaderOptions: the arguments of a loader, checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from .._base._arrays import as_dtype, as_shape
from .._base._checks import as_count, check_timeout, flag, is_coroutine_function, is_function
from .._base._types import SourceLine
from ..errors import InvalidArgumentError, InvalidTypeError
from ..pipeline import OnError, check_on_error
from ._fields import Layout, SampleDecoder
from ._sampler import SampledOrder, check_sampler
from ._sources import Order, Shuffle, SourceKind, kind_of, length_of

__all__ = ["Executor", "LoaderOptions", "OnError", "shard_of"]

Executor: TypeAlias = Literal["thread", "process"]

#: More batches ahead than this are a mistake: each takes pinned memory.
MAX_PREFETCH = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The arguments of `DataLoader`, checked.

    Attributes
    ----------
    kind, length
        Of the source: how it is read, and its number of samples; None if unknown.
    keywords
        Those that ``decode`` takes, of ``rng`` and ``epoch``.
    layout
        Of the memory of a batch; None without ``fields``.

    The others are those of the loader.
    """

    source: Any
    kind: SourceKind
    length: int | None
    layout: Layout | None
    decode: Callable[..., Any] | None
    keywords: tuple[str, ...]
    collate: Callable[[list[Any]], Any] | None
    batch_size: int
    drop_last: bool
    workers: int
    executor: Executor
    ordered: bool
    shuffle: Shuffle | None
    sampler: Iterable[Any] | None
    shard: tuple[int, int]
    prefetch: int
    on_error: OnError
    timeout: float | None
    restarts: int

    @classmethod
    def checked(
        cls,
        source: Any,
        fields: Mapping[Any, Any] | Sequence[Any] | None,
        decode: Any,
        collate: Any,
        shuffle: Any,
        sampler: Any,
        shard: Any,
        **options: Any,
    ) -> LoaderOptions:
        """Return the options, or raise `InvalidTypeError` or `InvalidArgumentError` with the value and the cure."""
        if getattr(source, "batch_sampler", None) is not None:
            raise InvalidTypeError(
                f"the source, a {type(source).__name__} of torch, gives batches: sync_to_device(loader) copies them, "
                "and so does to_device(loader, device); or pass loader.dataset"
            )
        kind = kind_of(source)
        batch_size = _checked_batch_size(options["batch_size"])
        layout = None if fields is None else Layout(_fields(fields), batch_size)
        for name, function in (("decode", decode), ("collate", collate)):
            _check_function(name, function)
        if collate is not None and layout is not None:
            raise InvalidArgumentError(
                "collate= stacks decoded arrays, and with fields= they are never made: leave one out"
            )
        executor = options["executor"]
        if executor not in ("thread", "process"):
            raise InvalidArgumentError(f"executor is 'thread' or 'process', not {executor!r}")
        workers = as_count(options["workers"], "workers", 0)
        if executor == "process" and not workers:
            raise InvalidArgumentError("executor='process' needs workers=, the number of processes, of at least 1")
        prefetch = as_count(options["prefetch"], "prefetch", 1)
        if prefetch > MAX_PREFETCH:
            raise InvalidArgumentError(f"prefetch is at most {MAX_PREFETCH} batches, not {prefetch}", prefetch=prefetch)
        shard = _checked_shard(shard)
        if sampler is not None:
            check_sampler(sampler, kind != "map", shuffle, shard[1])
        return cls(
            source=source,
            kind=kind,
            length=length_of(source, kind),
            layout=layout,
            decode=decode,
            keywords=_keywords_of(decode, 1 if layout is None else 2),
            collate=collate,
            batch_size=batch_size,
            drop_last=flag(options["drop_last"], "drop_last"),
            workers=workers,
            executor=executor,
            ordered=flag(options["ordered"], "ordered"),
            shuffle=_checked_shuffle(shuffle, kind),
            sampler=sampler,
            shard=shard,
            prefetch=prefetch,
            on_error=check_on_error(options["on_error"]),
            timeout=_checked_timeout(options["timeout"]),
            restarts=as_count(options["restarts"], "restarts", 0),
        )

    def decoder(self, *, checks: bool) -> SampleDecoder:
        """Return the decoder of one sample. It also reads the sample, unless another object reads the source.

        With ``checks`` it looks for fields that ``decode`` does not write.
        """
        source = self.source if self.kind == "map" else None
        seed = 0 if self.shuffle is None else self.shuffle.seed
        return SampleDecoder(source, self.decode, checks=checks, keywords=self.keywords, seed=seed)

    @property
    def samples(self) -> int | None:
        """The number of samples of a source with indices; None for a stream."""
        return self.length if self.kind == "map" else None

    @property
    def epoch_samples(self) -> int | None:
        """The number of samples of an epoch, of all ranks together; None if unknown."""
        return self.length if self.sampler is None else length_of(self.sampler)

    def order(self, epoch: int, start: int = 0, first: int = 0, sampled: SampledOrder | None = None) -> Order:
        """Return the order of an epoch, from a global position and the number of the batch there."""
        return Order(self.batch_size, self.drop_last, self.shard, self.shuffle, epoch, start, first, sampled)


def _fields(fields: Any) -> dict[Any, tuple[tuple[int, ...], np.dtype[Any]]]:
    cure = "fields is a list like [((3, 224, 224), np.uint8)], or a mapping like {'image': ((3, 224, 224), np.uint8)}"
    if isinstance(fields, (list, tuple)):
        fields = dict(enumerate(fields))
    if not isinstance(fields, Mapping):
        raise InvalidTypeError(f"{cure}, not {fields!r}")
    if not fields:
        raise InvalidArgumentError(f"{cure}, and this one is empty: leave it out if decode returns arrays")
    found = {}
    for name, field in fields.items():
        if not isinstance(field, (tuple, list)) or len(field) != 2:
            raise InvalidTypeError(f"{cure}: the shape of one sample and its dtype; field {name!r} has {field!r}")
        shape, dtype = field
        try:
            kind = as_dtype(dtype)
            found[name] = as_shape(shape, kind.itemsize), kind
        except (InvalidArgumentError, InvalidTypeError) as error:
            several = isinstance(shape, (tuple, list)) and any(each in (None, -1) for each in shape)
            sizes = "; for samples of different sizes leave fields= out, and use collate=" if several else ""
            raise type(error)(
                f"field {name!r} of fields= is {field!r}, not the shape of one sample and its dtype: {error}{sizes}"
            ) from None
    return found


def _check_function(name: str, function: Any) -> None:
    if function is None:
        return
    if not is_function(function):
        raise InvalidTypeError(f"{name} is a function, not {type(function).__name__}")
    if name == "collate":
        with contextlib.suppress(ValueError):  # a function in C without a signature
            try:
                inspect.signature(function).bind(None)
            except TypeError as error:
                raise InvalidTypeError(f"collate is called with the list of the samples of a batch: {error}") from None
    if is_coroutine_function(function):
        raise InvalidTypeError(
            f"{name} runs on a worker thread or in a worker process, which await nothing: pass a plain function, or "
            "use a Pipeline with Stage(…, concurrency=…) for coroutines"
        )


def _keywords_of(decode: Any, positional: int) -> tuple[str, ...]:
    """Return the keywords of `SampleDecoder.keywords` that a function names, behind its positional arguments."""
    if decode is None:
        return ()
    try:
        signature = inspect.signature(decode)
    except (TypeError, ValueError):  # a function in C without a signature
        return ()
    try:
        signature.bind_partial(*range(positional))
    except TypeError:
        raise InvalidTypeError(
            "decode takes a sample, and with fields= the views of one row, decode(sample, out), into which it writes, "
            f"such as out['x'][...] = sample: this is decode{signature}"
        ) from None
    parameters = list(signature.parameters.values())[positional:]
    bound = decode.keywords if isinstance(decode, functools.partial) else {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {each.name: each.default for each in parameters if each.kind in kinds and each.name not in bound}
    found = named.keys() & {"rng", "epoch"}
    for name in named.keys() - found:
        if named[name] is inspect.Parameter.empty:
            cure = ""
            if name in ("index", "idx"):
                cure = ": batch.indices has the samples' indices, or let source[index] return them"
            elif positional == 1 and name == parameters[0].name:
                cure = ": decode(sample, out) writes into fields=, which is missing"
            raise InvalidTypeError(
                f"decode{signature} requires {name!r}, and decode may also take rng and epoch only{cure}"
            )
    return tuple(sorted(found))


def _checked_shuffle(shuffle: Any, kind: SourceKind) -> Shuffle | None:
    if shuffle is None:
        return None
    if not isinstance(shuffle, Shuffle):
        cure = "leave it out for the order of the source" if shuffle is False else "Shuffle(seed=0)"
        raise InvalidTypeError(f"shuffle is an aiocuda.data.Shuffle or None, not {shuffle!r}: {cure}")
    if kind == "map" and shuffle.window is not None:
        raise InvalidArgumentError(
            f"the source has a length, so its order is a permutation of all samples: leave window={shuffle.window} out",
            window=shuffle.window,
        )
    if kind != "map" and shuffle.window is None:
        raise InvalidArgumentError(
            "a stream of samples is shuffled within a window, which takes memory for that many samples: "
            "Shuffle(seed=0, window=1000)"
        )
    return shuffle


def _checked_batch_size(batch_size: Any) -> int:
    if batch_size is None:
        raise InvalidTypeError(
            "batch_size is an integer, not None: sync_to_device(source) and to_device(source, device) copy items that "
            "are batches already"
        )
    return as_count(batch_size, "batch_size", 1)


def _checked_timeout(timeout: Any) -> float | None:
    seconds = check_timeout(timeout)
    if seconds == 0:
        raise InvalidArgumentError("timeout is more than 0 seconds for a sample, and None is no limit", timeout=seconds)
    return seconds


class _Shard(tuple[int, int]):
    """A shard that has been compared with the ranks of `torch.distributed`: `sync_loader` passes it to a loader."""

    __slots__ = ()


def shard_of(shard: Any, sampler: Any) -> Any:
    """Return the shard of a loader. Warn if `torch.distributed` has ranks that it does not divide the samples among."""
    if isinstance(shard, _Shard):
        return shard
    rank, world = (0, 1) if shard is None else _checked_shard(shard)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        ranks, own = distributed.get_world_size(), distributed.get_rank()
        wrong = ""
        if shard is None and ranks > 1 and getattr(sampler, "num_replicas", 1) == 1:
            cure = f"shard=(rank, {ranks}) divides them, and shard=(0, 1) says that a rank takes all"
            wrong = f"each of {ranks} ranks loads all samples: {cure}"
        elif 1 < ranks < world or (
            1 < ranks == world and rank != own
        ):  # fewer shards may be those of model parallelism
            wrong = (
                f"shard=({rank}, {world}) on rank {own} of {ranks} of torch.distributed: shard=({own}, {ranks}) is its"
            )
            wrong += " part, and others are loaded twice or never"
        if wrong:
            SourceLine.of_caller().warn(wrong, RuntimeWarning)
    return _Shard((rank, world))


def _checked_shard(shard: Any) -> tuple[int, int]:
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise InvalidTypeError(f"shard is (rank, world size), not {shard!r}")
    rank, world = as_count(shard[0], "the rank of shard", 0), as_count(shard[1], "the world size of shard", 1)
    if rank >= world:
        raise InvalidArgumentError(f"shard is (rank, world size), and rank {rank} is not below {world}", rank=rank)
    return rank, world
