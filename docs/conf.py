"""Sphinx's settings. Warnings are errors: `make docs`."""

from __future__ import annotations

import aiocuda

project = "aiocuda"
author = "The aiocuda developers"
copyright = author
version = release = aiocuda.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]  # no intersphinx: the build needs no network
exclude_patterns = ["_build", "benchmarks"]
html_theme = "furo"
html_title = f"aiocuda {release}"

default_role = "py:obj"  # `Stream.wait` in a docstring is a link where there is something to link to
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
autodoc_default_options = {"members": True, "show-inheritance": True}
numpydoc_show_class_members = False  # autodoc has listed them already
numpydoc_class_members_toctree = False
