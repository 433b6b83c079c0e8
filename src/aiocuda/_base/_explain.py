"""Notes for the errors of Python about calls of aiocuda."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from ._mistakes import CLASSES
from ._user_code import add_note

__all__ = ["explain"]

#: Parameters that no method has, and what to use in their place. `explain` reads them.
_PARAMETERS: Final[Mapping[str, str]] = {
    "depth": "Pipeline(device, stages, depth=3) takes it",
    **dict.fromkeys(("dst", "src"), "it takes them by position, the target first: stream.copy(target, source)"),
    "dtype": "a buffer has the dtype of the array: array.astype(dtype) before, or after",
    "enable_timing": "use timing=True",
    "stream": "the stream is the object whose method is called",
    "timeout": "`async with asyncio.timeout(seconds)` limits an await",
}

#: How Python refuses the arguments of a call, and other uses of an object.
_REFUSED = re.compile(
    r"(?:(?P<cls>\w+)\.|(?=copy\(|wait\(|as_completed\())(?P<method>\w+)\(\) "
    r"(?:takes |missing |got (?:an unexpected keyword argument '(?P<name>\w+)')?)"
)
_MISUSED = {
    r"(?:object |')(Device|DeviceBuffer|Stream|UnifiedBuffer)(?: can't be used in 'await'|' object can't be awaited)":
    "it can be used at once: leave the `await` out. Operations are awaited",
    r"'async_generator' object (?:is not iterable|can't be awaited)|object async_generator can't be used in 'await'":
    "`async for` iterates over it, as over aiocuda.as_completed(operations)",
    r"'\S*Operation' object does not support the asynchronous": "an operation is awaited: `await operation`",
}  # fmt: skip


def explain(error: BaseException | None) -> None:
    """Add a note to a TypeError of Python about a call of aiocuda: the signature of the method, and perhaps a cure.

    So a hot path needs no code for calls that Python refuses by itself.
    """
    for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        explain(each)
    if error is None or type(error) is not TypeError:
        return
    text = str(error)
    for pattern, note in _MISUSED.items():
        if re.match(pattern, text):
            add_note(error, note)
    found = _REFUSED.match(text)
    if found is None:
        return
    is_copy = found["method"] == "copy"
    owner: Any = CLASSES.get(found["cls"] or "Stream") if found["cls"] or is_copy else sys.modules["aiocuda"]
    method = getattr(owner, found["method"], None)
    notes = [_PARAMETERS[found["name"]]] if found["name"] in _PARAMETERS else []
    signature = inspect.signature(method) if callable(method) else None
    if signature is not None and found["name"] not in signature.parameters:  # else it is one of another name
        names = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name != "self"]
        shown = signature.replace(parameters=names, return_annotation=signature.empty)
        called = f"{owner.__name__}.{found['method']}".removesuffix(".__init__")
        notes.insert(0, f"it is {called}{shown}")
    if notes:
        add_note(error, ": ".join(notes))
