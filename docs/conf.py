"""Settings of the user guide: ``sphinx-build -W --keep-going -b html docs docs/_build``."""

import arraylogchain

project = "arraylogchain"
author = "The arraylogchain developers"
project_copyright = author
version = release = arraylogchain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# Docstrings follow numpydoc; their types are prose, such as "array [..., T, K]".
napoleon_google_docstring = False
napoleon_use_ivar = False
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Names in single backticks become links where they are documented, and code elsewhere.
default_role = "py:obj"

html_theme = "furo"
html_title = f"arraylogchain {release}"
