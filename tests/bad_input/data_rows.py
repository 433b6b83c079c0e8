"""Rows 77 to 79: data loaders."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiocuda import InvalidArgumentError, InvalidTypeError
from aiocuda.data import DataLoader, Shuffle, to_device
from tests.bad_input.case import Case, each_of

FIELDS = {"x": ((4,), np.float32)}


def _decode(sample: Any, out: Any) -> None: ...


async def _coroutine(sample: Any) -> None: ...


def _options(name: str, value: Any, error: type[Exception], text: str, **others: Any) -> Case:
    return Case(
        77,
        f"{name} {getattr(value, '__name__', repr(value))}",
        each_of(lambda world, given: DataLoader(world.device, [1, 2, 3], **{**others, name: given}), value),
        error,
        text,
    )


def _of_two(a: Any, b: Any) -> Any:
    return a, b


def _writes(sample: Any, out: Any) -> None:
    out[0][...] = sample


def _of_index(sample: Any, *, index: int) -> Any:
    return sample, index


class LengthOnly:
    """A source without items."""

    def __len__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "a length only"


class HalfASource:
    """A source whose length is no integer."""

    def __len__(self) -> Any:
        return 24 / 2  # noqa: PLE0303 - this is the mistake

    def __getitem__(self, index: int) -> int:
        return index

    def __repr__(self) -> str:
        return "half a source"


CASES: list[Case] = [
    *(
        _options(name, value, InvalidArgumentError, *(text or [str(value)]))
        for name, value, *text in (
            ("batch_size", 0),
            ("batch_size", -1),
            ("workers", -1),
            ("prefetch", 0),
            ("prefetch", 10**9),
            ("restarts", -1),
            ("executor", "greenlet"),
            ("timeout", -1.0),
            ("timeout", 0, "None is no limit"),
            ("timeout", float("nan")),
            ("on_error", "ignore"),
            ("shard", (2, 2), "rank 2"),
            ("shard", (-1, 2), "-1"),
            ("shard", (0, 0), "not 0"),
        )
    ),
    *(
        _options(name, value, InvalidTypeError, text)
        for name, value, text in (
            ("batch_size", 1.5, "1.5"),
            ("batch_size", None, "copy items that are batches already"),
            ("batch_size", True, "True"),
            ("workers", "4", "'4'"),
            ("on_error", ValueError, "a function of the exception and the item"),
            ("on_error", len, "on_error is called with the exception and the item"),
            ("ordered", np.ones(2), "ordered"),
            ("timeout", "1 s", "1 s"),
            ("shard", 0, "0"),
            ("shard", (0.0, 1), "0.0"),
            ("shuffle", True, "Shuffle(seed=0)"),
            ("shuffle", False, "leave it out for the order of the source"),
            ("sampler", 4, "RandomSampler(dataset)"),
            ("sampler", list, "is an object, not <class 'list'>: make one"),
            ("collate", _of_two, "called with the list of the samples of a batch: missing a required argument: 'b'"),
            ("decode", _writes, "decode(sample, out) writes into fields=, which is missing"),
            ("decode", _of_index, "batch.indices has the samples' indices"),
            ("fields", {"x": (np.float32, (4,))}, "field 'x' of fields= is (<class 'numpy.float32'>, (4,)), not the"),
            ("fields", {"x": ((4,), object)}, "field 'x' of fields="),
            ("fields", {"x": ((None, 4), "f4")}, "for samples of different sizes leave fields= out, and use collate="),
            ("decode", 7, "int"),
            ("decode", _coroutine, "Pipeline"),
            ("collate", "stack", "str"),
            ("fields", "x", "fields is a list like"),
            ("fields", ((3, 2, 2), np.uint8), "field 0 has (3, 2, 2)"),
            ("fields", [("x", "f4")], "not 'x'"),
            ("fields", {"x": (4,)}, "field 'x' has (4,)"),
            ("fields", {"x": ((4,), "text")}, "text"),
        )
    ),
    _options("fields", {}, InvalidArgumentError, "leave it out"),
    _options("collate", list, InvalidArgumentError, "leave one out", fields=FIELDS),
    _options("workers", 0, InvalidArgumentError, "workers=", executor="process"),
    _options("shuffle", Shuffle(window=8), InvalidArgumentError, "window=8"),
    Case(
        77,
        "window of a stream",
        lambda world, _: DataLoader(world.device, iter([1]), shuffle=Shuffle()),
        InvalidArgumentError,
        "Shuffle(seed=0, window=1000)",
    ),
    Case(77, "window 0", lambda *_: Shuffle(window=0), InvalidArgumentError, "0"),
    Case(77, "seed 1.5", lambda *_: Shuffle(seed=1.5), InvalidTypeError, "1.5"),  # type: ignore[arg-type]
    Case(77, "depth 0", lambda world, _: to_device([], world.device, depth=0), InvalidArgumentError, "0"),
    Case(77, "epoch -1", lambda world, _: DataLoader(world.device, []).epoch(-1), InvalidArgumentError, "-1"),
    *(
        Case(
            78,
            f"source {value!r:.20}",
            each_of(lambda world, given: DataLoader(world.device, given), value),
            InvalidTypeError,
            text,
        )
        for value, text in (
            *((7, "int"), (None, "NoneType"), ("paths", "str"), (b"paths", "bytes"), ({"a": 1}, "dict")),
            (LengthOnly(), "LengthOnly has __len__ only"),
            (HalfASource(), "len(source) of HalfASource has failed, and it is the number of samples, an integer"),
        )
    ),
    Case(78, "no device", lambda *_: DataLoader("gpu:0", []), InvalidTypeError, "not 'gpu:0'"),  # type: ignore[call-overload]
    *(
        Case(
            78,
            name,
            each_of(lambda world, given: DataLoader(world.device, [1]).load_state_dict(given), state),
            error,
            text,
        )
        for name, state, error, text in (
            ("state None", None, InvalidTypeError, "NoneType"),
            ("state of no version", {}, InvalidArgumentError, "version None"),
            ("state without a position", {"version": 1}, InvalidArgumentError, "incomplete"),
            (
                "state of another source",
                DataLoader.merge_state_dicts(
                    [
                        {
                            "version": 1,
                            "epoch": 0,
                            "position": 2,
                            "batches": 2,
                            "ahead": [],
                            "samples": 9,
                            "shuffle": None,
                        }
                    ]
                ),
                InvalidArgumentError,
                "9 samples",
            ),
        )
    ),
    Case(78, "no states", lambda *_: DataLoader.merge_state_dicts([]), InvalidArgumentError, "no state to merge"),
    *(
        Case(
            79,
            name,
            each_of(
                lambda world, given: DataLoader(
                    world.device, [1], fields=FIELDS, decode=given, workers=1, executor="process"
                ),
                decode,
            ),
            InvalidTypeError,
            "cannot be pickled",
        )
        for name, decode in (("a lambda for a process", lambda sample, out: None),)
    ),
    Case(
        79,
        "a generator for a process",
        lambda world, _: DataLoader(world.device, [(each for each in [1])], workers=1, executor="process"),
        InvalidTypeError,
        "generator",
    ),
]
