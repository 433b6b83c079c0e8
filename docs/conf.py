"""Sphinx's settings. Warnings are errors: `make docs`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import pkgutil
import re
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

import aiocuda

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
html_copy_source = False  # the sources have the comments that `without_comments` removes
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
    *("Batch", "DeviceBatches", "SyncArray", "SyncBatch", "SyncBatches", "SyncDeviceBatches", "SyncEpoch"),
}

_ALIAS = re.compile(r"TypeAliasForwardRef\('([\w.]+)'\)")  # an alias that is part of a union
_UNKNOWN = re.compile(r", \*\*unknown: [\w.~]+")  # refused, with the cure
_YIELDED = re.compile(r"^[~\w.]+\[")


def _signature(
    app: Sphinx, what: str, name: str, thing: Any, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """What a reader writes, where Python's own signature says something else."""
    if what == "class" and (thing.__name__ in _MADE_BY_OTHERS or getattr(thing, "_is_protocol", False)):
        return "", None
    if signature is not None:
        signature = _UNKNOWN.sub("", _ALIAS.sub(r"\1", signature))
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


_FENCE_OR_COMMENT = re.compile(r"^```.*?^```$|^<!--.*?-->$", re.MULTILINE | re.DOTALL)


def without_comments(text: str) -> str:
    """Return a page without its HTML comments, which are for tests. Lines keep their numbers."""

    def replaced(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith("`") else "\n" * match[0].count("\n")

    return _FENCE_OR_COMMENT.sub(replaced, text)


_INDEX = re.compile(r"^<!-- index: (.*)\n-->$", re.MULTILINE)


def with_index(text: str) -> str:
    """Return a page with index entries in place of the comments ``<!-- index: word, words``, of two lines.

    The search shows a page with such an entry before all others. A reader of the source does not see it.
    """
    return _INDEX.sub(lambda match: "```{index} " + re.sub("(^|, )", r"\1! ", match[1]) + "\n```", text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = without_comments(with_index(source[0]))


def _search_with_numbers() -> Any:
    """Return the search of English with numbers such as 429: Sphinx ignores words that have only digits."""
    from sphinx.search.en import SearchEnglish

    class SearchWithNumbers(SearchEnglish):
        js_splitter_code = r"""
var splitQuery = (query) =>
  query
    .split(/[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu)
    .filter((word) => word)
    .map((word) => (/^\d{3,}$/.test(word) ? `number${word}` : word));
"""

        def split(self, input: str) -> list[str]:
            words = super().split(input)
            return [f"number{word}" if re.fullmatch(r"\d{3,}", word) else word for word in words]

    return SearchWithNumbers


class _Stub(types.SimpleNamespace):
    """Something of a library that is not installed. It has all names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub()


def _stub_libraries() -> None:
    """Stub libraries that are not installed: autodoc imports the integrations for their docstrings only."""
    for name in ("torch", "cupy", "numba", "numba_cuda", "cuda.core"):
        try:
            missing = importlib.util.find_spec(name) is None
        except ModuleNotFoundError:  # of the package that contains it
            missing = True
        if missing:
            stub: Any = types.ModuleType(name)
            stub.__version__ = "99.0"
            stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
            stub.__getattr__ = lambda name: _Stub()
            sys.modules[name] = stub


def _bases(app: Sphinx, name: str, thing: type, options: Any, bases: list[type]) -> None:
    """Leave private base classes out: those that no public package of the library exports."""

    def is_public(base: Any) -> bool:
        base = typing.get_origin(base) or base
        package, name = base.__module__.partition("._")[0], getattr(base, "__name__", "")
        return not package.startswith("aiocuda") or getattr(sys.modules[package], name, None) is base

    bases[:] = [base for base in bases if is_public(base)] or [object]


#: Members that are used before those which the source defines before them.
_FIRST = {
    "Stream": ("empty", "zeros", "empty_like", "upload", "copy", "fill", "launch", "submit", "download"),
    "Device": ("stream", "load", "pinned", "pin", "unified", "offload"),
    "Operation": ("wait", "done", "result", "exception", "state"),
    "Pipeline": ("submit", "run", "execute_iteration"),
    "TripleBuffer": ("slot", "upload_slot", "compute_slot", "download_slot", "advance", "acquire", "release"),
    "Graph": ("launch", "update", "wait"),
    "Event": ("done", "wait", "elapsed_ms"),
    "Kernel": ("compile",),
}


def _order_members(app: Sphinx) -> None:
    """Let classes that are shown under a public package have their members in the order of use, or of the source.

    autodoc looks for that order in the file of the package, finds nothing, and sorts by name.
    """
    from sphinx.pycode import ModuleAnalyzer

    packages = [each.name for each in pkgutil.iter_modules(aiocuda.__path__, "aiocuda.") if "._" not in each.name]
    for package in ["aiocuda", *packages]:
        module = importlib.import_module(package)
        analyzer = ModuleAnalyzer.for_module(package)
        analyzer.analyze()
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)  # imported now, and not with the package
            if inspect.isclass(thing) and thing.__module__ == package:
                of_source = (member for kind in thing.__mro__ for member in vars(kind))
                for member in dict.fromkeys([*_FIRST.get(thing.__name__, ()), *of_source]):
                    analyzer.tagorder.setdefault(f"{thing.__name__}.{member}", len(analyzer.tagorder))


def _without_object(app: Sphinx, doctree: Any) -> None:
    """Remove the line of the bases of a class that has no public one."""
    from docutils import nodes

    for line in [line for line in doctree.findall(nodes.paragraph) if line.astext() == "Bases: object"]:
        line.parent.remove(line)


def _sidebar_of_maintainers(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Give the pages below ``maintainers.md`` a sidebar of their own. Furo's has the pages below ``index.md``."""
    from furo.navigation import get_navigation_tree
    from sphinx import addnodes
    from sphinx.environment.adapters.toctree import TocTree

    root = "maintainers"
    if page != root and page not in app.env.toctree_includes.get(root, ()):
        return
    trees = app.env.get_doctree(root).findall(addnodes.toctree)
    resolved = [
        TocTree(app.env).resolve(page, app.builder, tree, prune=False, titles_only=True, includehidden=True)
        for tree in trees
    ]
    html = "".join(app.builder.render_partial(tree)["fragment"] for tree in resolved if tree is not None)
    context["furo_navigation_tree"] = get_navigation_tree(html)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    _stub_libraries()
    app.connect("builder-inited", _order_members)
    app.connect("autodoc-process-bases", _bases)
    app.connect("doctree-read", _without_object)
    app.connect("html-page-context", _sidebar_of_maintainers, priority=900)  # after furo's own
    app.connect("autodoc-process-signature", _signature)
    app.connect("source-read", _read)
    app.add_search_language(_search_with_numbers())
