"""Sphinx's configuration of the site: `make docs`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # tools

import rankscope  # noqa: E402 - the version

project = "Rankscope"
version = release = rankscope.__version__
copyright = "the authors of Rankscope"
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "tools.site_directives",
    "tools.notebook_pages",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# `Work` in a docstring is a link where there is such a name, else plain code.
default_role = "py:obj"
# `--async` and quotes are copied out of pages and typed.
smartquotes = False
autodoc_member_order = "bysource"
# The types are in the sections of the docstrings, for people.
autodoc_typehints = "none"
# As the code has them: a default is read, not evaluated.
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
numpydoc_show_class_members = False

# Nothing is fetched from elsewhere when a page is shown: furo brings all it needs.
html_theme = "furo"
html_title = "Rankscope"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
