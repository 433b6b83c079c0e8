"""Sphinx's settings. Warnings are errors: `make docs`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import re
import sys
import types
from typing import TYPE_CHECKING, Any

# Libraries of the integrations that are not installed here: autodoc imports the modules for their docstrings only.
for _name in ("torch", "cupy", "numba", "numba_cuda", "cuda.core"):
    try:
        _missing = importlib.util.find_spec(_name) is None
    except ModuleNotFoundError:  # of the package that contains it
        _missing = True
    if _missing:
        _stub: Any = types.ModuleType(_name)
        _stub.__version__ = "99.0"
        _stub.__spec__ = importlib.machinery.ModuleSpec(_name, None)
        _stub.__getattr__ = lambda name: types.SimpleNamespace()
        sys.modules[_name] = _stub

import aiocuda  # noqa: E402 - after the stubs

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "aiocuda"
author = "The aiocuda developers"
copyright = author
version = release = aiocuda.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]  # no intersphinx: the build needs no network
exclude_patterns = ["_build", "benchmarks"]
html_theme = "furo"
html_title = f"aiocuda {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
pygments_dark_style = "github-dark"  # the theme's default underlines the names of modules

default_role = "py:obj"  # `Stream.wait` in a docstring is a link where there is something to link to
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {  # by the names that the source has for them, not by what they stand for
    name: name
    for name in (
        "DriverName",
        "PolicyName",
        "Priority",
        "StrategyName",
        "Workload",
        "npt.ArrayLike",
        "npt.DTypeLike",
        "npt.NDArray",
    )
}
autodoc_type_aliases["HasQueue"] = "Stream"
python_maximum_signature_line_length = 100
autodoc_default_options = {"members": True, "show-inheritance": True}
numpydoc_show_class_members = False  # autodoc has listed them already
numpydoc_class_members_toctree = False

# Programs do not call these: a device, a stream, a ring, a loader or a batcher makes them.
_MADE_BY_OTHERS = {
    *("Bracket", "Device", "DeviceBuffer", "DeviceMemory", "Event", "Node", "Operation"),
    *("LeasedStream", "PinnedBuffer", "Place", "Slot", "Stream", "UnifiedBuffer"),
    *("Batch", "SyncArray", "SyncBatch"),
}

_ALIAS = re.compile(r"TypeAliasForwardRef\('([\w.]+)'\)")  # an alias that is part of a union
_YIELDED = re.compile(r"^[~\w.]+\[")


def _signature(
    app: Sphinx, what: str, name: str, thing: Any, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """What a reader writes, where Python's own signature says something else."""
    if what == "class" and (thing.__name__ in _MADE_BY_OTHERS or getattr(thing, "_is_protocol", False)):
        return "", None
    if signature is not None:
        signature = _ALIAS.sub(r"\1", signature)
    if returns is None:
        return signature, None
    returns = _ALIAS.sub(r"\1", returns)
    made_of = getattr(thing, "__wrapped__", None)
    if inspect.isasyncgenfunction(made_of) and not inspect.isasyncgenfunction(thing):
        returns = f"AbstractAsyncContextManager[{_YIELDED.sub('', returns)}"
    elif inspect.isgeneratorfunction(made_of) and not inspect.isgeneratorfunction(thing):
        returns = f"AbstractContextManager[{_YIELDED.sub('', returns)}"
    elif returns.endswith("._Opening"):
        returns = "AbstractAsyncContextManager[Device]"
    return signature, returns


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _signature)
