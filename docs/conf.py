"""Configuration of the documentation site; `make docs` builds it."""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dadplug  # noqa: E402  (needs the path)

project = "dadplug"
author = "dadplug maintainers"
copyright = "2026, dadplug maintainers"
version = release = dadplug.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"dadplug {release}"
html_static_path: list[str] = []
html_copy_source = False
html_theme_options = {
    "source_repository": "",
    "light_css_variables": {"content-padding": "2.5rem"},
}

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4  # a heading links as on a forge: page.md#its-words-in-lower-case
myst_links_external_new_tab = False

# Docstrings are in Google's style; single backticks in them are code.
default_role = "literal"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# With -n every reference has to lead somewhere. Types in signatures are the exception: those of torch, of the trainers
# and of Python have their entries on other sites, which are not downloaded here.
nitpick_ignore_regex = [("py:.*", ".*")]


def escape_asterisks(app: Sphinx, what: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Escape asterisks outside of code, such as those of `*shape`, which would begin emphasised text."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...", "* ")):
            parts = re.split(r"(``.*?``|`.*?`)", line)
            lines[number] = "".join(each if each.startswith("`") else each.replace("*", r"\*") for each in parts)


def setup(app: Sphinx) -> None:
    """Connect what this site adds to Sphinx."""
    app.connect("autodoc-process-docstring", escape_asterisks, priority=400)  # before napoleon
