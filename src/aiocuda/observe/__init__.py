"""Profiler, timeline and exporters: how long the operations of a device take, and when they run.

The exporters are imported when they are first used: each needs a package of the extra ``observe``. See its
README.md in the repository.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..completion import BatchListener, Instrument, StartedBatch
from ._drawing import COLOURS as COLOURS
from ._drawing import Panel as Panel
from ._drawing import draw as draw
from ._drawing import draw_panels as draw_panels
from ._page import page_of as page_of
from ._profiler import LabelProfile, OperationProfile, ProfileReport, StreamProfile, StreamProfiler
from ._recording import Recording as Recording
from ._recording import merged as merged
from ._recording import shown as shown
from ._timeline import Timeline, TimelineSpan
from ._trace import trace_of as trace_of

if TYPE_CHECKING:
    from ._nvtx import NvtxInstrument
    from ._opentelemetry import OpenTelemetryInstrument
    from ._prometheus import PrometheusCollector

#: What users find. What is imported by ``as`` is for other packages of aiocuda.
__all__ = [
    "BatchListener",
    "Instrument",
    "LabelProfile",
    "NvtxInstrument",
    "OpenTelemetryInstrument",
    "OperationProfile",
    "ProfileReport",
    "PrometheusCollector",
    "StartedBatch",
    "StreamProfile",
    "StreamProfiler",
    "Timeline",
    "TimelineSpan",
]

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept misspelt names
    #: The module of each exporter, the package that it imports, and the name of that package on PyPI.
    _EXPORTERS = {
        "NvtxInstrument": ("._nvtx", "nvtx", "nvtx"),
        "OpenTelemetryInstrument": ("._opentelemetry", "opentelemetry", "opentelemetry-api"),
        "PrometheusCollector": ("._prometheus", "prometheus_client", "prometheus-client"),
    }

    def __getattr__(name: str) -> object:
        """Import an exporter when it is first used."""
        if name not in _EXPORTERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, package, distribution = _EXPORTERS[name]
        try:
            value = getattr(importlib.import_module(module, __name__), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != package:
                raise
            from .._base._extras import install

            cure = install("observe", distribution)
            raise ImportError(f"{name} needs the package {distribution}: {cure}", name=package) from error
        value.__module__ = __name__  # the public name, for `repr` and the documentation
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
