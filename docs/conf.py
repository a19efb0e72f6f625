"""Settings of the documentation: ``sphinx-build -W --keep-going -b html docs docs/_build``."""

import logging
import os
import tomllib
from pathlib import Path

import arraylogchain

HERE = Path(__file__).parent
ADDRESSES = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"]["urls"]

project = "arraylogchain"
author = "The arraylogchain developers"
project_copyright = author
version = release = arraylogchain.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    # MathJax comes along with this package, so that formulas are readable without a network.
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# Tutorials are executed; an error, or anything on stderr, fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_output_stderr = "warn"
nb_merge_streams = True
logging.getLogger("traitlets").setLevel(logging.WARNING)  # else it names every kernel
os.environ["MATPLOTLIBRC"] = str(HERE / "matplotlibrc")

# Docstrings follow numpydoc; their types are prose, such as "array [..., T, K]".
napoleon_google_docstring = False
napoleon_use_ivar = False
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Names in single backticks become links where they are documented, and code elsewhere.
default_role = "py:obj"

# Inventories of the objects that the pages name: a build needs no network.
intersphinx_mapping = {
    library: (site, str(HERE / "inventories" / f"{library}.txt"))
    for library, site in {
        "cupy": "https://docs.cupy.dev/en/stable/",
        "numpy": "https://numpy.org/doc/stable/",
        "python": "https://docs.python.org/3/",
        "scipy": "https://docs.scipy.org/doc/scipy/",
        "torch": "https://docs.pytorch.org/docs/stable/",
    }.items()
}

copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"arraylogchain {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "project.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_context = {
    "project_links": {
        "Repository": ADDRESSES["Repository"],
        "Issues": ADDRESSES["Issues"],
        "Changes": ADDRESSES["Changelog"],
        "How to cite": f"{ADDRESSES['Repository']}/blob/main/CITATION.cff",
        "License": f"{ADDRESSES['Repository']}/blob/main/LICENSE",
    }
}
