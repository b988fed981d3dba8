"""The site that `make docs` builds from the pages in this folder, which are plain Markdown for a code host, too."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "site"), str(HERE.parent / "src")]

# Pages and notebooks are made side by side, one on each core: PyTorch's own threads would only be in their way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import kinfed  # noqa: E402

project = "kinfed"
author = "the kinfed developers"
version = release = kinfed.__version__
root_doc = "README"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "contents",
    "generated",
    "formulas",
    "tables",
    "checked",
]
exclude_patterns = ["site", "conf.py"]
html_theme = "furo"
html_title = "kinfed"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_js_files = ["sortable.js"]
html_show_copyright = html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
templates_path: list[str] = []

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links to headings are written as code hosts make them
myst_dmath_double_inline = True
myst_disable_syntax = ["myst_line_comment"]  # a line that begins with a percent sign is text

nb_execution_mode = "auto"
nb_execution_in_temp = True  # what notebooks write is not left among the pages
nb_execution_timeout = 600  # seconds of one cell, on a machine that is busy with other work
nb_execution_excludepatterns = ["notebooks/federation.md"]  # minutes on a busy machine; a slow test runs it
nb_execution_raise_on_error = True
nb_merge_streams = True

highlight_language = "none"  # a block without a language is what a program prints
smartquotes = False  # settings are shown as they are typed
default_role = "literal"  # docstrings write `name` as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
REQUESTS = [f"set_{name}_request" for name in ("fit", "predict", "predict_proba", "score")]  # scikit-learn adds them
autodoc_default_options = {"exclude-members": ", ".join(REQUESTS)}
napoleon_google_docstring = True
nitpicky = False
