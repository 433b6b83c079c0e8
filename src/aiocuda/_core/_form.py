"""The form of the core that the process uses: compiled, or in Python."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from ..errors import InvalidArgumentError
from ._sources import MODULES, hash_of_sources

__all__ = ["BUILD", "VARIABLE", "Form", "form"]

#: The variable that chooses the form.
VARIABLE = "AIOCUDA_CORE"

#: The command that builds the extension.
BUILD = "python -m aiocuda._core.build"


class Form(NamedTuple):
    """The form of the core.

    Attributes
    ----------
    name
        ``"compiled"`` or ``"python"``.
    missing
        Why the compiled form is not in use, although it was not refused; None if it is, or was.
    modules
        The modules that have the names of the core.
    """

    name: Literal["compiled", "python"]
    missing: str | None
    modules: tuple[ModuleType, ...]

    @property
    def obstacle(self) -> str | None:
        """The reason why the core cannot be compiled on this machine; None if it can be."""
        from .build import why_not_compiled  # imported here, because only `aiocuda doctor` asks

        return why_not_compiled()


@functools.cache
def form() -> Form:
    """Choose the form by ``AIOCUDA_CORE``, at the first use of the core, and import it.

    ``auto``, the default, takes the compiled form if it is there and of these sources. ``compiled`` and ``python`` take
    that form.

    Raises
    ------
    InvalidArgumentError
        The variable has another value.
    ImportError
        The compiled form was asked for and cannot be used.
    """
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted not in ("auto", "compiled", "python"):
        raise InvalidArgumentError(
            f"{VARIABLE}={wanted!r}: use 'auto' (the default), 'compiled' or 'python'", variable=VARIABLE
        )
    missing = None
    if wanted != "python":
        module, missing = _extension()
        if module is not None:
            return Form("compiled", None, (module,))
        if wanted == "compiled":
            raise ImportError(f"{VARIABLE}=compiled, but {missing}: build it by `{BUILD}`")
    return Form("python", missing, tuple(importlib.import_module(f".{name}", __package__) for name in MODULES))


def _extension() -> tuple[ModuleType | None, str | None]:
    """Return the compiled core and None; or None and the reason why it cannot be used."""
    spec = importlib.util.find_spec("._compiled", __package__)
    if spec is None or spec.origin is None:
        return None, "the core is not compiled for this Python"
    present = hash_of_sources()  # None if the sources are not installed: then nothing is compared
    if present is not None and present.encode() not in Path(spec.origin).read_bytes():  # without executing the file
        return None, "the compiled core is older than its source"
    try:
        return importlib.import_module("._compiled", __package__), None
    except ImportError as error:
        return None, f"the compiled core cannot be loaded: {error}"
